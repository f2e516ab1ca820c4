"""Layers that run as a megatron-core or fused module."""
