"""Programs that use the planner or the runtime. Looking up a model by name skips them."""
