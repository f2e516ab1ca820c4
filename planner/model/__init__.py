"""Structure of a model graph, and its requirements on a layout. Independent of the layout."""
