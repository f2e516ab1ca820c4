NNODES=1 NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-8B-Base --dataset a b c --packing true --lr 1e-5 \
  --tensor_model_parallel_size 2 --sequence_parallel true --micro_batch_size 2 --global_batch_size 64 \
  --max_length 8192 --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 --tuner_type full
