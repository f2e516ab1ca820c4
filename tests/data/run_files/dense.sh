#!/bin/bash
GPUS=8; TP=${TP:-2}
MODEL=(--num-layers 8 --hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8 --group-query-attention
    --num-query-groups 4 --seq-length 1024 --max-position-embeddings 1024 --position-embedding-type rope
    --swiglu --disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights)
if [ "$TP" -gt 1 ]; then MORE="--sequence-parallel"; fi
torchrun --nproc_per_node $GPUS pretrain_gpt.py "${MODEL[@]}" $MORE --tensor-model-parallel-size $TP \
    --micro-batch-size 2 --global-batch-size $((GPUS * 4)) --bf16 --use-distributed-optimizer --overlap-grad-reduce \
    --overlap-param-gather --attention-softmax-in-fp32 --lr 1e-4 --train-iters 100 --vocab-size 32000 \
    --tokenizer-type NullTokenizer --attention-dropout 0 --hidden-dropout 0
