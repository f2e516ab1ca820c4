"""Data: indexed datasets, tokenizers, text sources, and the samples of a run by seed and number."""
