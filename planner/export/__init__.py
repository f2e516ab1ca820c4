"""Plans written as files for other programs: Megatron-LM, Megatron-Bridge, Accelerate, torchtitan and Slurm."""
