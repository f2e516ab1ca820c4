"""Which layouts are legal: rules by theme, and what they ask of a model."""
