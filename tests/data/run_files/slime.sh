MODEL_ARGS=(--num-layers 4 --hidden-size 256 --ffn-hidden-size 1024 --num-attention-heads 8 --vocab-size 1000 --swiglu)
PERF_ARGS=(--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --micro-batch-size 1)
ray job submit --address=http://127.0.0.1:8265 -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 \
  "${MODEL_ARGS[@]}" "${PERF_ARGS[@]}" --seq-length 2048 --rollout-batch-size 32 --n-samples-per-prompt 8 \
  --num-steps-per-rollout 2 --sglang-mem-fraction-static 0.7 --position-embedding-type rope --attention-dropout 0
