"""Megatron-LM's runs: its flags, what they say of a model and its layout, and its logs."""
