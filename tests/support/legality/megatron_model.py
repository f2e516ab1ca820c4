"""A decoder as megatron-core builds it on one rank: its configuration under a layout, and one layer of each kind.

Three parts are replaced, because megatron-core has them on CUDA or with Transformer Engine only, or leaves them to its
callers: the attention core returns zeros, the duplicated projection is a plain linear, and the vocabulary is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from megaloom.planner.contract.choices import Overlap, Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Precision
from tests.support.legality.random_cases import (
    HEAD_DIM,
    HIDDEN,
    KV_RANK,
    ROPE,
    Decoder,
)


def config(d: Decoder, x: Layout, precision: Precision) -> Any:
    """Return the TransformerConfig of a decoder under a layout.

    The overlaps within a micro-batch are checked by the constructor and then turned off: to run them takes Transformer
    Engine or a GPTModel.
    """
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    kind, latent = TransformerConfig, {}
    if d.latent:
        kind, latent = (
            MLATransformerConfig,
            {
                "q_lora_rank": None,
                "kv_lora_rank": KV_RANK,
                "qk_head_dim": HEAD_DIM,
                "qk_pos_emb_head_dim": ROPE,
                "v_head_dim": HEAD_DIM,
                "rope_type": "rope",
            },
        )
    full = {"recompute_method": "block", "recompute_num_layers": x.recompute_layers or d.layers}
    built = kind(
        num_layers=d.layers,
        hidden_size=HIDDEN,
        num_attention_heads=d.heads,
        num_query_groups=d.kv_heads,
        kv_channels=HEAD_DIM,
        ffn_hidden_size=d.ff,
        gated_linear_unit=d.gated and not d.biased,
        add_bias_linear=d.biased,
        num_moe_experts=d.experts or None,
        moe_ffn_hidden_size=d.expert_ff or None,
        moe_shared_expert_intermediate_size=d.shared_ff or None,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
        moe_layer_freq=[int(i >= d.dense_layers) for i in range(d.layers)],
        mtp_num_layers=1 if d.multi_token else None,
        tensor_model_parallel_size=x.tp,
        sequence_parallel=x.sequence_parallel,
        context_parallel_size=x.cp,
        pipeline_model_parallel_size=x.pp,
        virtual_pipeline_model_parallel_size=x.vpp if x.vpp > 1 else None,
        microbatch_group_size_per_vp_stage=x.microbatch_group or None,
        pipeline_model_parallel_layout=_pipeline_layout(d, x) if x.pp * x.vpp > 1 else None,
        expert_model_parallel_size=x.ep,
        expert_tensor_parallel_size=x.etp,
        recompute_granularity=None if x.recompute is Recompute.NONE else str(x.recompute),
        recompute_modules=list(x.recomputed_modules) or None,
        moe_grouped_gemm=d.experts > 0,  # as callers set for bf16
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=x.vpp > 1,
        batch_p2p_comm=x.vpp == 1,
        cuda_graph_scope=[],
        perform_initialization=False,
        bf16=precision is Precision.BF16,
        fp16=precision is Precision.FP16,
        tp_comm_overlap=x.has_overlap(Overlap.TENSOR),
        overlap_moe_expert_parallel_comm=x.has_overlap(Overlap.EXPERTS),
        **full if x.full_recompute else {"recompute_num_layers": x.recompute_layers or None},
        **latent,
    )
    built.tp_comm_overlap = built.overlap_moe_expert_parallel_comm = False
    return built


def _pipeline_layout(d: Decoder, x: Layout) -> list[list[str]]:
    """Return the layers of each stage, assigned as evenly as possible; with more stages than layers, some have none."""
    stages: list[list[str]] = [[] for _ in range(x.pp * x.vpp)]
    stages[0].append("embedding")
    for i in range(d.layers):
        stages[i * len(stages) // d.layers].append("decoder")
    stages[-1] += ["mtp"] * d.multi_token + ["loss"]
    return stages


class Core(torch.nn.Module):
    """An attention core that returns zeros; megatron-core's runs on CUDA only. It checks no divisibility."""

    def __init__(self, *_: Any, v_channels: int = HEAD_DIM, **__: Any) -> None:
        super().__init__()
        self.width = v_channels

    def forward(self, query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return query.new_zeros(*query.shape[:2], query.shape[2] * self.width)


class Duplicated(torch.nn.Linear):
    """A projection that is not sharded; megatron-core's needs Transformer Engine."""

    def __init__(self, n: int, out: int, **_: Any) -> None:
        super().__init__(n, out, bias=False)


def chunk(d: Decoder, x: Layout, precision: Precision) -> Any:
    """Return a model chunk with one layer of each kind, in the buffers of DistributedDataParallel."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import MegatronModule

    settings = config(d, x, precision)

    class Chunk(MegatronModule):
        """The layers by their names."""

        model_type = None

        def __init__(self) -> None:
            super().__init__(settings)
            self.layers = torch.nn.ModuleDict({name: build() for name, build in _layers(d, settings)})

        def set_input_tensor(self, tensor: Any) -> None:
            """Store the input of this stage, which another stage has sent."""
            self.received = tensor[0]

    sharded = DistributedDataParallelConfig(
        use_distributed_optimizer=x.distributed_optimizer,
        overlap_grad_reduce=x.has_overlap(Overlap.GRADIENTS),
        overlap_param_gather=x.has_overlap(Overlap.WEIGHTS),
    )
    return DistributedDataParallel(settings, sharded, Chunk())


def _layers(d: Decoder, config: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import attention, mlp, multi_latent_attention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
    from megatron.core.transformer.spec_utils import ModuleSpec

    groups = ProcessGroupCollection.use_mpu_process_groups()
    linears = mlp.MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    vocab = config.tensor_model_parallel_size  # padded, as callers do
    kind = "learned_absolute" if d.positions else "rope"
    yield "embedding", lambda: LanguageModelEmbedding(config, vocab, d.positions, kind, tp_group=groups.tp)
    if d.latent:
        multi_latent_attention.TELinear, multi_latent_attention.HAVE_TE = Duplicated, False
        latent = multi_latent_attention.MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_kv_down_proj=Duplicated,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=Core,
            linear_proj=RowParallelLinear,
            q_layernorm=IdentityOp,
            kv_layernorm=IdentityOp,
        )
        yield "latent", lambda: multi_latent_attention.MLASelfAttention(config, latent, 1, pg_collection=groups)
    else:
        parts = attention.SelfAttentionSubmodules(ColumnParallelLinear, Core, RowParallelLinear)
        causal = AttnMaskType.causal
        yield "mix", lambda: attention.SelfAttention(config, parts, 1, causal, pg_collection=groups)
    if d.dense_layers or not d.experts:
        yield "dense", lambda: mlp.MLP(config, linears, ffn_hidden_size=d.ff, tp_group=groups.tp)
    if d.experts:
        shared = ModuleSpec(SharedExpertMLP, submodules=linears) if d.shared_ff else None
        experts = MoESubmodules(ModuleSpec(SequentialMLP, submodules=linears), shared)
        yield "experts", lambda: MoELayer(config, experts, 1, pg_collection=groups)
