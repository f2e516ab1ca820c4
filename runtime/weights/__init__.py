"""Weights in files: views that read slices, and Hugging Face folders."""
