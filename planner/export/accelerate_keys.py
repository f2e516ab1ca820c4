"""Keys of Accelerate's `megatron_lm_config` and Megatron-LM's options: one table, to write a plan and to read it.

Each key begins with `megatron_lm_` in the file. Source: Accelerate 1.15.0, MegatronLMPlugin in utils/dataclasses.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

MEGATRON_PREFIX = "megatron_lm_"
MICROBATCHES = "num_micro_batches"  # of a step on each data-parallel rank, which no option of Megatron-LM states
ACCELERATE_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "tensor-model-parallel-size": "tp_degree",
        "pipeline-model-parallel-size": "pp_degree",
        "sequence-parallel": "sequence_parallelism",
        "context-parallel-size": "context_parallel_size",
        "expert-model-parallel-size": "expert_model_parallel_size",
        "expert-tensor-parallel-size": "expert_tensor_parallel_size",
        "decoder-last-pipeline-num-layers": "decoder_last_pipeline_num_layers",
        "recompute-activations": "recompute_activations",
        "recompute-granularity": "recompute_granularity",
        "recompute-method": "recompute_method",
        "recompute-num-layers": "recompute_num_layers",
        "use-distributed-optimizer": "use_distributed_optimizer",
        "attention-dropout": "attention_dropout",
        "hidden-dropout": "hidden_dropout",
        "use-rotary-position-embeddings": "use_rotary_position_embeddings",
    }
)
"""Options, and the keys that say them."""
OTHER_DEFAULTS: Mapping[str, str] = MappingProxyType(
    {
        "context-parallel-size": "2",
        "recompute-granularity": "full",
        "recompute-method": "uniform",
        "recompute-num-layers": "1",
        "use-rotary-position-embeddings": "true",
        "attention-dropout": "0.0",
        "hidden-dropout": "0.0",
    }
)
"""Values of options whose keys are not in a file, where Megatron-LM has others."""
