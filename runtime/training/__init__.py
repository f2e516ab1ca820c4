"""Training: runs, their loop, data, metrics, and the comparison of a plan with one process."""
