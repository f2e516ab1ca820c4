"""Legality of layouts: rules by theme, and the comparison of a plan with its model."""
