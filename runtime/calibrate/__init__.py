"""Timing of matrix products, attention and collectives on this machine."""
