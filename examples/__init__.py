"""Models of each family, ready to plan and to train."""

if __name__ != "megaloom.examples":
    raise ImportError("import megaloom.examples, not examples")
