"""Facts derived from a declaration: FLOPs, parameters, saved activations, sharding, collectives, recompute."""
