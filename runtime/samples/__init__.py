"""Samples: the named tensors of one sequence, made from text, and their checks."""
