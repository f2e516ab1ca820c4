"""Models of published runs: decoders and hybrids by their dimensions, and examples by their published names."""
