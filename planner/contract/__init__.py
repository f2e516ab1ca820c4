"""Values that planner and runtime agree on: layout, workload, devices, plan."""
