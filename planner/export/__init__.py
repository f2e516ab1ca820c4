"""Plans written as files for Megatron-LM, Megatron-Bridge, Accelerate, torchtitan, and as jobs of `megaloom train`."""
