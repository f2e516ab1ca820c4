import os

from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training.config import ConfigContainer, DistributedDataParallelConfig, TrainingConfig

LONG = 2 * 1024


def gpt_pretrain_config(nodes: int = 1) -> ConfigContainer:
    provider = GPTModelProvider(num_layers=8, hidden_size=512, num_attention_heads=8, ffn_hidden_size=2048)
    provider.seq_length = LONG
    provider.vocab_size = 32000
    provider.tensor_model_parallel_size = 2
    provider.sequence_parallel = True
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=nodes > 0)
    train = TrainingConfig(micro_batch_size=2, global_batch_size=int(os.environ.get("BATCH", "64")))
    config = ConfigContainer(train=train, ddp=ddp, mixed_precision="bf16_mixed")
    config.model = provider
    return config
