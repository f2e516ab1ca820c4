"""Adapters for megatron-core: CPU shim, process groups, build context, recompute, kernels, optimizers."""
