"""Where a model goes: the layout of its layers over the devices of a cluster, and what that costs."""

if __name__ != "megaloom.planner":
    raise ImportError("import megaloom.planner, not planner")
