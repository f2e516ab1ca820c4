"""One chunk of the model on one pipeline rank: a slice of the graph as one MegatronModule.

megatron-core's schedules call it with a micro-batch and hand it the hidden states of the stage before. What
crosses a cut is one tensor [seq, batch, embed].
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import torch
from attrs import frozen
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint, make_viewless_tensor
from torch import Tensor, nn

from megaloom.dsl import Graph, Node, Unembed
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Stage
from megaloom.planner.rules.capabilities import shared_weight_users
from megaloom.runtime.megatron.build_context import BuildContext
from megaloom.runtime.megatron.recompute import Repeating, Repeats
from megaloom.runtime.modules import fused, registry


@frozen(eq=False, slots=False)
class Segment:
    """Nodes that run together; when `again`, the backward pass runs them again instead of keeping their insides."""

    nodes: tuple[Node, ...]
    again: bool
    reads: tuple[str, ...]  # values from before it
    writes: tuple[str, ...]  # values that something after it reads

    @cached_property
    def done(self) -> tuple[tuple[str, ...], ...]:
        """For each node, the values that nothing reads after it, so that what autograd does not need is freed."""
        last = {name: i for i, n in enumerate(self.nodes) for name in (*n.inputs, n.name)}
        return tuple(
            tuple(name for name, i in last.items() if i == here and name not in self.writes)
            for here in range(len(self.nodes))
        )


class ModelChunk(MegatronModule):
    """The nodes [start, stop) of a graph. Called with token ids and labels [batch, seq] of this rank's positions;
    returns hidden states, or on the last stage the loss of each token [batch, seq] in fp32.
    """

    def __init__(self, graph: Graph, stage: Stage, context: BuildContext) -> None:
        super().__init__(context.config)
        self.graph, self.groups = graph, context.groups
        self.model_type = ModelType.encoder_or_decoder
        self.vp_stage = stage.chunk if context.groups.layout.vpp > 1 else None
        self.pre_process, self.post_process = stage.start == 0, stage.stop == len(graph.nodes)
        self.reads = () if self.pre_process else graph.live_values[stage.start]
        self.writes = graph.outputs if self.post_process else graph.live_values[stage.stop]
        nodes = [n for n in graph.nodes[stage.start : stage.stop] if not n.is_input]
        self.segments = segments(nodes, self.writes, context.groups.layout)
        self.repeats = Repeats.of(nodes, context.groups.layout.recomputed_modules)
        self.modules_of = nn.ModuleDict({_key(n): registry.module(n, context) for n in nodes})
        self.received: Tensor | None = None
        self.tie = tied(graph)
        self.share_embeddings_and_output_weights = self.tie is not None
        self._tie()

    def _tie(self) -> None:
        """Make the table of the embedding serve the logits too: one parameter here, or two kept equal by
        finalize_model_grads."""
        if self.tie is None:
            return
        embed, unembed = (self._module(n) for n in self.tie)
        if embed and unembed:
            unembed.weight = embed.weight
        elif copy := embed or unembed:
            copy.weight.shared_embedding = True
            copy.weight.shared = copy is unembed  # counted once in the gradient's norm, on the embedding's stage

    def _module(self, node: Node) -> nn.Module | None:
        """A node's module, if the node is on this stage."""
        key = _key(node)
        return self.modules_of[key] if key in self.modules_of else None  # noqa: SIM401 (a ModuleDict has no get)

    def set_input_tensor(self, tensors: Any) -> None:
        """What the stage before sent; the schedules give a list of one."""
        self.received = tensors[0] if isinstance(tensors, list | tuple) else tensors

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """The tied weight, on the stages that hold it."""
        for n in self.tie or ():
            if module := self._module(n):
                return module.weight
        return None

    def node_modules(self) -> Iterator[tuple[Node, nn.Module]]:
        """The nodes of this stage, each with its module."""
        for s in self.segments:
            for n in s.nodes:
                yield n, self.modules_of[_key(n)]

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        values = {n.name: tokens for n in self.graph.nodes if n.is_input}
        if self.reads:
            assert self.received is not None, "the schedule sets the input tensor first"
            # A view would keep what it is a view of from being freed.
            values[self.reads[0]] = make_viewless_tensor(self.received, requires_grad=True, keep_graph=True)
        for s in self.segments:
            run, given = partial(self._through, s), (values[name] for name in s.reads)
            again = s.again and torch.is_grad_enabled()
            written = tensor_parallel.checkpoint(run, False, *given) if again else run(*given)
            values.update(zip(s.writes, written, strict=True))
        out = values[self.writes[0]]
        if not self.post_process:
            return out
        return self._loss(out, labels.transpose(0, 1).contiguous()).transpose(0, 1).contiguous()

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of each token. Of logits in fp32 megatron-core makes what it keeps, in their place."""
        if logits.dtype is torch.float32:
            return vocab_parallel_cross_entropy(logits, labels)
        return fused.cross_entropy(logits, labels, self.groups.collection.tp)

    def _through(self, segment: Segment, *given: Tensor) -> tuple[Tensor, ...]:
        """What a segment writes, from what it reads."""
        values = dict(zip(segment.reads, given, strict=True))
        repeats = Repeating(self.repeats)
        for n, done in zip(segment.nodes, segment.done, strict=True):
            values[n.name] = repeats.run(n, self.modules_of[_key(n)], *(values[name] for name in n.inputs))
            for name in done:
                del values[name]
        return tuple(values[name] for name in segment.writes)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Each parameter under its layout-independent name, with this rank's share of it."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        out: dict[str, Any] = {}
        for n, module in self.node_modules():
            key = f"{prefix}{n.name}."
            if isinstance(n.op, Unembed):
                out |= self._logits_state(n, module, key, metadata)
            else:
                out |= self._state(module, key, sharded_offsets, metadata)
        return out

    def _state(self, module: nn.Module, prefix: str, offsets: tuple[Any, ...], metadata: dict[str, Any]) -> Any:
        """The parameters of a module: as megatron-core's says, else by the marks that a divided parameter has."""
        groups = {"tp_group": self.groups.collection.tp, "dp_cp_group": metadata["dp_cp_group"]}
        if hasattr(module, "sharded_state_dict"):
            return sharded_state_dict_default(module, prefix, offsets, metadata, tp_group=groups["tp_group"])
        held = module.state_dict(keep_vars=True)
        experts = {k: p for k, p in held.items() if not getattr(p, "allreduce", True)}
        padded = {k: p for k, p in held.items() if k not in experts and getattr(p, "padded", False)}
        state = {k: p for k, p in held.items() if k not in experts and k not in padded}
        divided = {k: p.partition_dim for k, p in state.items() if getattr(p, "tensor_model_parallel", False)}
        dense = make_sharded_tensors_for_checkpoint(state, prefix, divided, offsets, **groups)
        for k, p in padded.items():  # how much padding there is depends on tp
            dense[prefix + k] = make_tp_sharded_tensor_for_checkpoint(
                p, prefix + k, p.partition_dim, allow_shape_mismatch=True, **groups
            )
        return dense | {prefix + k: self._expert_state(prefix + k, p) for k, p in experts.items()}

    def _expert_state(self, key: str, p: Tensor) -> ShardedTensor:
        """The weight of the experts that this rank holds, the first of its dims, as a body keeps it."""
        x, divided = self.groups.layout, getattr(p, "partition_dim", -1)
        places = [(0, self.groups.ep_rank, x.ep), *([(divided, self.groups.etp_rank, x.etp)] if divided >= 0 else [])]
        replica = (0, 0 if divided >= 0 else self.groups.etp_rank, self.groups.collection.expt_dp.rank())
        padded = getattr(p, "padded", False)
        return ShardedTensor.from_rank_offsets(key, p, *places, replica_id=replica, allow_shape_mismatch=padded)

    def load(self, state: dict[str, Any]) -> None:
        """Take the parameters that `sharded_state_dict` named, as read from a checkpoint."""
        for n, module in self.node_modules():
            prefix = f"{n.name}."
            own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            module.load_state_dict(own, strict=not self._borrows(n))

    def _borrows(self, node: Node) -> bool:
        """Whether a node's weight is the embedding's on this same stage."""
        return self.tie is not None and node is self.tie[1] and self._module(self.tie[0]) is not None

    def _logits_state(self, node: Node, module: nn.Module, prefix: str, metadata: dict[str, Any]) -> dict[str, Any]:
        """The table of the logits, and their bias: padded by layout. A tied table is a replica of the embedding's."""
        groups = {"tp_group": self.groups.collection.tp, "dp_cp_group": metadata["dp_cp_group"]}
        out: dict[str, Any] = {}
        for name, p in module.named_parameters():
            key, replica = f"{prefix}{name}", {}
            if name == "weight" and self._borrows(node):
                continue
            if name == "weight" and self.tie is not None:
                key = f"{self.tie[0].name}.weight"
                replica = {"replica_id": (1, 0, metadata["dp_cp_group"].rank())}
            out[f"{prefix}{name}"] = make_tp_sharded_tensor_for_checkpoint(
                p, key, allow_shape_mismatch=True, **replica, **groups
            )
        return out


def _key(node: Node) -> str:
    """A node's name as torch allows it."""
    return node.name.replace(".", "_")


def tied(graph: Graph) -> tuple[Node, Node] | None:
    """Return the embedding and the logits that share one table, or None.

    No other nodes share weights: `make_build_context` refuses them.
    """
    for embed, unembed in shared_weight_users(graph).values():
        return embed, unembed
    return None


def segments(nodes: list[Node], outputs: tuple[str, ...], layout: Layout) -> tuple[Segment, ...]:
    """The nodes in runs: with full recompute one for each block of a repeat, else one in all.

    Of these blocks as many are computed again as the layout says, from the first on.
    """
    full = layout.full_recompute
    runs = [tuple(g) for _, g in groupby(nodes, key=lambda n: n.block if full else None)]
    blocks = [run[0].block for run in runs if run[0].block is not None]
    again = set(blocks[: layout.recompute_layers or None]) if full else set()
    out = []
    for i, run in enumerate(runs):
        own = {n.name for n in run}
        reads = tuple(dict.fromkeys(name for n in run for name in n.inputs if name not in own))
        later = {name for r in runs[i + 1 :] for n in r for name in n.inputs} | set(outputs)
        writes = tuple(n.name for n in run if n.name in later)
        out.append(Segment(run, run[0].block in again, reads, writes))
    return tuple(out)
