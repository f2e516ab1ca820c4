"""The oracle: a whole model by its bodies, in plain torch."""
