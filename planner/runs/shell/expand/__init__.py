"""Expansion of words in a state of variables: parameters, patterns, arithmetic, braces, conditions, output."""
