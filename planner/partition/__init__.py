"""Partition of the model into pipeline stages under a time and memory objective."""
