"""Pipeline schedules: the order of passes on each rank, micro-batches in flight, start times."""
