"""Training: engine, loop, data, checkpoints, optimizer, metrics."""
