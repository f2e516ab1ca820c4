"""The optimizer: megatron-core's AdamW, its recipe, parameter groups, averaged weights, and the weight update."""
