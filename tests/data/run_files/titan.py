from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.qwen3 import model_registry
from torchtitan.trainer import Trainer


def qwen3_8b() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("8B"),
        training=TrainingConfig(local_batch_size=2, seq_len=4096),
        parallelism=ParallelismConfig(data_parallel_replicate_degree=2, data_parallel_shard_degree=4),
        activation_checkpoint=None,
    )
