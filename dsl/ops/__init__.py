"""The primitive operations of a layer body: weights, products, shapes, norms, attention, routing, sequences."""
