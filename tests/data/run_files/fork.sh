torchrun --nnodes 1 --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 4 \
  --seq-length 512 --max-position-embeddings 512 --micro-batch-size 1 --global-batch-size 8 --fp16 --lr 1e-4 \
  --tokenizer-type NullTokenizer --vocab-size 1000 --transformer-impl transformer_engine --use-flash-attn \
  --deepspeed --deepspeed_config ds.json --zero-stage 1 --attention-dropout 0 --hidden-dropout 0
