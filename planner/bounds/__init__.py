"""Lower bounds of step time and memory."""
