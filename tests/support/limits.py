"""Safety limit of the tests."""

LIMIT = 500.0
"""Seconds after which ranks or a process are taken for hung, also on a busy machine. pytest's own limit is above it."""
