"""The published model families as declarations, with readers for their config.json and checkpoints."""

if __name__ != "megaloom.examples":
    raise ImportError("import megaloom.examples, not examples")
