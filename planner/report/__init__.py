"""Reports on plans: text for a terminal, JSON, an HTML page with charts, and a Chrome trace."""
