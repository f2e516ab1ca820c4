"""Hugging Face: config.json reader, registry of architectures, tensor names, state dict."""
