"""A mixture of experts as a torch module: the layer's own gate, megatron-core's dispatch and experts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe import moe_layer, token_dispatcher
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megaloom.dsl import MoE
from megaloom.planner.contract.choices import Module
from megaloom.planner.contract.engine_parts import EnginePart
from megaloom.runtime.body.balancing_loss import Balancing
from megaloom.runtime.body.corrections import Correction
from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.build_context import BuildContext
from megaloom.runtime.ops.routing import top_k_experts

from .experts import Experts, StackedExperts
from .layers import LINEARS
from .permutation import permute, sort_chunks, unpermute

token_dispatcher.permute, token_dispatcher.unpermute = permute, unpermute  # by gathers, not atomic additions
token_dispatcher.sort_chunks_by_idxs = sort_chunks


class Mixture(moe_layer.MoELayer):
    """megatron-core's mixture of experts, with shared experts if the layer has any."""

    def __init__(
        self, op: MoE, config: TransformerConfig, shared: TransformerConfig | None, context: BuildContext
    ) -> None:
        groups = context.groups
        parts = moe_layer.MoESubmodules(
            experts=ModuleSpec(StackedExperts if context.stacked_experts else Experts, submodules=LINEARS),
            shared_experts=ModuleSpec(SharedExperts, params={"own_config": shared}, submodules=LINEARS),
            router=partial(Router, op),
        )
        super().__init__(config, parts, pg_collection=groups.collection)
        for p in self.experts.parameters():
            # Expert parameters use the expert process groups and their own optimizer on every layout. megatron-core's
            # layers set this only if ep > 1; with tp alone the gradients would be reduced over the wrong ranks. Expert
            # biases are not replicas over tp: they are not added over tp, and they count in the gradient norm.
            p.allreduce, p.sequence_parallel, p.tensor_model_parallel = False, False, True
        if Module.MOE_ACT in groups.layout.recomputed_modules:
            self.experts.recompute_activations()
        self.to(device.current())  # the router creates its weight on the CPU
        if EnginePart.EXPERTS in context.engine:
            self.experts.use_engine(adds_gradients=context.adds_gradients)
        if context.stacked_experts and self.token_dispatcher.ep_size * self.token_dispatcher.tp_size == 1:
            # Neither messages nor products need numbers of tokens on the host, so it does not wait for them.
            self.token_dispatcher._maybe_dtoh_and_synchronize = _kept_on_device

    def forward(self, x: Tensor, *, balancing: Balancing | None = None) -> Tensor:
        self.router.balancing = balancing
        y, _ = super().forward(x)
        return y


def _kept_on_device(point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
    """Return the numbers of tokens as they are. point: the place in the forward pass."""
    return tokens_per_expert


class SharedExperts(SharedExpertMLP):
    """megatron-core's shared experts, with their own configuration: the layer may declare another kind than experts."""

    def __init__(self, own_config: TransformerConfig, config: TransformerConfig, **options: Any) -> None:
        super().__init__(own_config, **options)


class Router(TopKRouter):
    """megatron-core's router with the gate of the layer.

    It counts the tokens of each expert, from which each step moves the corrections of the scores.
    """

    def __init__(self, op: MoE, config: TransformerConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self.op = op
        self.balancing: Balancing | None = None  # of the micro-batch that runs
        self.bias = nn.Parameter(torch.empty_like(self.weight[:, 0])) if op.bias else None
        if self.bias is not None:
            self.bias.sequence_parallel = config.sequence_parallel

    def corrections(self) -> list[Correction]:
        """Return the correction of the gate; none if its scores are not corrected."""
        return [Correction(self.expert_bias, self.local_tokens_per_expert)] if self.op.corrected else []

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weight of each expert for each token, and whether it was chosen, both [tokens, experts]."""
        scores = logits.flatten(0, -2)
        experts, weights = top_k_experts(self.op.gate, scores, *([self.expert_bias] if self.op.corrected else []))
        gate = torch.zeros_like(scores).scatter(-1, experts, weights)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, experts, True)
        if self.op.balance and self.balancing:
            scores, selected = (x.view_as(logits).transpose(0, 1) for x in (scores, chosen))
            gate = self.balancing.attach(self.op, gate, scores, selected, [self.tp_cp_group])
        self._apply_expert_bias(chosen)
        return gate, chosen
