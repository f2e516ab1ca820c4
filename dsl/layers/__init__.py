"""The built-in layers: norms, feed-forward layers, attention, mixture of experts, Mamba-2, embeddings."""
