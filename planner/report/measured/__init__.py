"""Measured steps beside their predictions: traces that the runtime writes, their sums, and tables of differences."""
