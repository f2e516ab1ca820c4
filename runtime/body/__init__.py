"""Execution of a layer's body on its shards."""
