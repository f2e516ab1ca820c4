"""Plans as people and machines read them: text, JSON, pages, traces."""
