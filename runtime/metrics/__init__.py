"""Metrics of a run: figures of each step, metrics.jsonl, the display, trackers, and times of a profiled step."""
