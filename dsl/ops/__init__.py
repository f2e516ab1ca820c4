"""The primitives of a layer body: weights, products, shapes, norms, attention, routing, sequences."""
