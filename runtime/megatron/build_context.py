"""Where modules are built: the groups, and the configuration that megatron-core asks of each module."""

from __future__ import annotations

from typing import Any

import torch
from attrs import field, frozen
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megaloom.dsl import (
    BATCH,
    DType,
    Graph,
    Input,
    MoE,
    Split,
    UserError,
    Value,
)
from megaloom.planner.contract.choices import Module
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.planner.rules.capabilities import hidden_sizes, precision_refusal, untrainable

from .process_groups import ProcessGroups

DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16}


@frozen(eq=False)
class BuildContext:
    """The groups, what all layers' configurations share, and the length of a whole sequence."""

    groups: ProcessGroups
    fields: dict[str, Any]  # of TransformerConfig
    seq: int  # tokens
    config: TransformerConfig = field(init=False)

    @property
    def split(self) -> Split:
        """The degrees of the axes that shard tensors."""
        x = self.groups.layout
        return Split(tp=x.tp, cp=x.cp, ep=x.ep, etp=x.etp, sequence_parallel=x.sequence_parallel)

    @config.default
    def _config(self) -> TransformerConfig:
        return self.layer_config()

    def layer_config(self, **layer: Any) -> TransformerConfig:
        """The configuration with a layer's own fields."""
        return TransformerConfig(**{**self.fields, **layer})


def make_build_context(graph: Graph, layout: Layout, workload: Workload, groups: ProcessGroups) -> BuildContext:
    """The context of a model under a layout. Raises UserError for a model that the runtime cannot train."""
    trainable(graph)
    if workload.precision not in DTYPES:
        raise UserError("\n".join(precision_refusal(workload)))
    return BuildContext(groups, configure(graph, layout, workload), workload.seq)


def trainable(graph: Graph) -> None:
    """Check that the runtime trains such models. Raises UserError."""
    if wrong := untrainable(graph):
        raise UserError("\n".join(wrong))


def configure(graph: Graph, layout: Layout, workload: Workload) -> dict[str, Any]:
    """What megatron-core's modules and schedules must know of a layout, as fields of TransformerConfig."""
    dtype, hidden = DTYPES[workload.precision], embed(graph)
    mixtures = [n.op for n in graph.nodes if isinstance(n.op, MoE)]
    moe = mixtures[0] if mixtures else None
    within = [
        str(m) for m in layout.recomputed_modules if m in (Module.CORE_ATTN, Module.SHARED_EXPERTS)
    ]  # others: see `stage`
    return {
        "num_layers": layout.pp * layout.vpp,  # unused: our stages say which layers they hold
        "hidden_size": hidden,
        "num_attention_heads": layout.tp,
        "ffn_hidden_size": hidden,
        # The schedules scale the balancing loss if there are any experts.
        "num_moe_experts": moe.experts if moe else None,
        "moe_ffn_hidden_size": hidden if moe else None,
        # What a router computes its gate says. With sigmoid megatron-core takes any number of experts a token, and
        # moves the corrections after each step if there are any.
        "moe_router_score_function": "sigmoid",
        "moe_router_dtype": "fp32",
        "moe_router_enable_expert_bias": any(op.corrected for op in mixtures),
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "microbatch_group_size_per_vp_stage": layout.microbatch_group_size if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        # Groups say what etp is. This is asked for only to refuse biases in all layers of a model with experts.
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        # Interleaved with megatron-core's default settings is silently wrong at two pipeline ranks.
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
        "recompute_granularity": "selective" if within else None,
        "recompute_modules": within,
        # The loss is a sum over tokens, divided once by their number over all ranks: right on any layout.
        "calculate_per_token_loss": True,
        "init_method": _later,
        "output_layer_init_method": _later,
        # The norms of queries and keys see the heads of their own device: gradients are added over tp.
        "qk_layernorm": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "add_bias_linear": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "cuda_graph_scope": [],  # its default is deprecated, and says so
    }


def _later(weight: Tensor) -> Tensor:
    """No initial values: `weights` gives them, the same on every layout."""
    return weight


def inside(v: Value, x: Tensor) -> Tensor:
    """A value in the order of its dims, from how it lies between modules.

    There hidden states are megatron-core's [seq, batch, ..]; what the data provides is as it is declared.
    """
    return x.transpose(0, 1) if _hidden(v) else x


def outside(v: Value, x: Tensor) -> Tensor:
    """A value as it lies between modules, from the order of its dims."""
    return x.transpose(0, 1).contiguous() if _hidden(v) else x


def _hidden(v: Value) -> bool:
    made = not isinstance(v.source.op, Input) and v.dtype is not DType.INDEX
    return made and len(v.shape.dims) > 2 and v.shape.dims[0] == BATCH


def embed(graph: Graph) -> int:
    """The size of the hidden states between the layers, which is the same everywhere."""
    (size,) = hidden_sizes(graph)
    return size
