"""Plans in the words of other programs."""
