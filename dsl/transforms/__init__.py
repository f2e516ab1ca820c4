"""Layers and models made of others: repeated layers, low-rank adapters, packed sequences."""
