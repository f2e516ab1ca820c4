"""Structure of a model graph as the planner needs it, independent of the layout."""
