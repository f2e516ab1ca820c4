"""The build context: what modules need to be built, namely process groups and megatron-core's TransformerConfig."""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve, field, frozen
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megaloom.dsl import (
    BATCH,
    Dim,
    DType,
    Graph,
    Input,
    MoE,
    Node,
    Split,
    Value,
)
from megaloom.dsl.sharding_table import SEQUENCES
from megaloom.planner.contract.capability import Environment, Execution, capability
from megaloom.planner.contract.choices import Module
from megaloom.planner.contract.engine_parts import NO_PARTS, EnginePart
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Precision, Runtime, Workload
from megaloom.planner.rules.shared_weights import stored_by_rows

from .environment import building_environment
from .process_groups import ProcessGroups
from .releases import no_cuda_graphs

DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


@frozen(eq=False)
class BuildContext:
    """Process groups, the configuration fields that all layers share, length of a sequence, precision, shared tables.

    `of_node` gives the context of one node, whose hidden states may have a width and a length of their own.
    """

    groups: ProcessGroups
    shared_fields: dict[str, Any]  # of TransformerConfig
    seq: int  # tokens of a full sequence
    precision: Precision
    stored_by_rows: frozenset[str] = frozenset()  # shared weights that are stored with `embed` last
    environment: Environment = field(factory=building_environment)
    engine: frozenset[EnginePart] = NO_PARTS  # parts of the node's module that Transformer Engine computes
    stacked_experts: bool = False  # the weights of all experts of the node are one parameter for each product
    config: TransformerConfig = field(init=False)

    @property
    def split(self) -> Split:
        """The degrees of the axes that shard tensors."""
        x = self.groups.layout
        return x.split

    @config.default
    def _config(self) -> TransformerConfig:
        return self.layer_config()

    def of_node(self, node: Node) -> BuildContext:
        """Return the context for the module of one node: with the width and the length of its hidden states."""
        width = node.shape["embed"].known if "embed" in node.shape else self.config.hidden_size
        seq = next((d.size for d in node.shape if d.name in SEQUENCES and d.size is not None), self.seq)
        adds = self.execution(node).adds_gradients and not self.groups.layout.fsdp  # FSDP has no buffers to add to
        if (width, seq, adds) == (self.config.hidden_size, self.seq, self.adds_gradients):
            return self
        fields = {"hidden_size": width, "gradient_accumulation_fusion": adds}
        return evolve(self, shared_fields=self.shared_fields | fields, seq=seq)

    def execution(self, node: Node) -> Execution:
        """Return how this process runs a node, as plans for it assume."""
        found = capability(Runtime.MEGALOOM, self.environment)
        return found.execution(node, self.split, self.precision, self.stored_by_rows)

    @property
    def adds_gradients(self) -> bool:
        """True if products add the gradients of the node's weights to the buffers that DDP has for them."""
        return bool(self.config.gradient_accumulation_fusion)

    def layer_config(self, **layer: Any) -> TransformerConfig:
        """Return the configuration of one layer: the shared fields and its own."""
        return TransformerConfig(**{**self.shared_fields, **layer})


def make_build_context(
    graph: Graph, layout: Layout, workload: Workload, groups: ProcessGroups, assumed: Environment | None = None
) -> BuildContext:
    """Return the build context of a model that the runtime can train under a layout.

    assumed: the environment of its plan, by which Transformer Engine computes layers or does not.
    """
    fields = config_fields(graph, layout, workload)
    environment = building_environment(assumed)
    return BuildContext(groups, fields, workload.seq, workload.precision, stored_by_rows(graph), environment)


def config_fields(graph: Graph, layout: Layout, workload: Workload) -> dict[str, Any]:
    """Return the fields of TransformerConfig that a layout sets for all modules and for the schedules."""
    dtype, hidden = (
        DTYPES[workload.precision.wide],
        max(graph.hidden_sizes, default=1),
    )
    mixtures = [n.op for n in graph.nodes if isinstance(n.op, MoE)]
    moe = mixtures[0] if mixtures else None
    # megatron-core recomputes these modules itself; `recompute` and `body` recompute the others.
    recomputed = [str(m) for m in layout.recomputed_modules if m in (Module.CORE_ATTN, Module.SHARED_EXPERTS)]
    return {
        "num_layers": layout.pp * layout.vpp,  # not used: model chunks hold the nodes of the plan
        "hidden_size": hidden,
        "num_attention_heads": layout.tp,
        "ffn_hidden_size": hidden,
        # The schedules scale the balancing loss if there are any experts.
        "num_moe_experts": moe.experts if moe else None,
        "moe_ffn_hidden_size": hidden if moe else None,
        # Our router computes the gate; with "sigmoid" megatron-core accepts any top_k. It would move the corrections of
        # all gates as one tensor, so `body.corrections` moves them.
        "moe_router_score_function": "sigmoid",
        "moe_router_dtype": "fp32",
        "moe_router_enable_expert_bias": False,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "microbatch_group_size_per_vp_stage": layout.microbatch_group_size if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        # The process groups set etp. megatron-core reads this field only to refuse biases in models with experts.
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        # megatron-core's defaults compute wrong gradients with interleaving at two pipeline ranks.
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
        # A stage does not keep its outputs: the plan counts one of them (RECEIVE_BUFFERS of planner/cost/memory.py).
        "deallocate_pipeline_outputs": layout.pp > 1,
        "recompute_granularity": "selective" if recomputed else None,
        "recompute_modules": recomputed,
        # The loss is summed over tokens and divided once by the tokens of all ranks: correct under every layout.
        "calculate_per_token_loss": True,
        "init_method": _leave_uninitialized,
        "output_layer_init_method": _leave_uninitialized,
        # Norms of queries and keys see only local heads, so their gradients are reduced over tp.
        "qk_layernorm": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "add_bias_linear": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,  # `of_node` decides
        **no_cuda_graphs(),
    }


def _leave_uninitialized(weight: Tensor) -> Tensor:
    """Return the weight unchanged: `modules.parameters` sets initial values."""
    return weight


def to_declared_order(v: Value, x: Tensor) -> Tensor:
    """Return a tensor between modules with its dims in declared order.

    Between modules, hidden states are [seq, batch, ..] as in megatron-core. Inputs have their declared order.
    """
    return x.transpose(0, 1) if _is_hidden_state(v) else x


def to_megatron_order(v: Value, x: Tensor) -> Tensor:
    """Return a tensor in declared order as it is passed between modules: hidden states as [seq, batch, ..]."""
    return x.transpose(0, 1).contiguous() if _is_hidden_state(v) else x


def megatron_dims(v: Value) -> tuple[Dim, ...]:
    """Return the dims of a value in the order in which it is passed between modules."""
    batch, *rest = v.shape
    return (rest[0], batch, *rest[1:]) if _is_hidden_state(v) else v.shape.dims


def _is_hidden_state(v: Value) -> bool:
    computed = not isinstance(v.source.op, Input) and v.dtype is not DType.INDEX
    return computed and len(v.shape.dims) > 2 and v.shape.dims[0] == BATCH
