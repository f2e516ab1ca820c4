"""Running a plan: training a declared model on megatron-core, laid out as planned."""

if __name__ != "megaloom.runtime":
    raise ImportError("import megaloom.runtime, not runtime")
