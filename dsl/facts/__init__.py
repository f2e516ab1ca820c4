"""Facts of a declared model: FLOPs, parameters, saved activations, collectives, recompute."""
