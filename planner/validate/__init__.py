"""The cost model against runs that others published."""
