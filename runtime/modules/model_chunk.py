"""A model chunk: consecutive graph nodes of one pipeline rank, as one MegatronModule.

megatron-core's schedules call it with a micro-batch, and set the tensor received from the previous stage: the hidden
states that cross the boundary, packed (see `stage_boundary`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import torch
from attrs import frozen
from megatron.core import tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
)
from torch import Tensor, nn

from megaloom.dsl import Graph, Node, Unembed
from megaloom.dsl.facts.primitives import program
from megaloom.dsl.layers.losses import Stacked
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Stage
from megaloom.runtime.body.balancing_loss import Balancing
from megaloom.runtime.body.body_module import Body
from megaloom.runtime.megatron.build_context import BuildContext
from megaloom.runtime.megatron.recompute import SelectiveNodes, SelectiveRecompute
from megaloom.runtime.megatron.weight_shards import own_values
from megaloom.runtime.ops.dropout_masks import MaskSource

from . import registry
from .built_node import BuiltNode
from .layers import HiddenDropout
from .module_state import module_state
from .moe import Mixture
from .shared_weights import SharedUses
from .stage_boundary import StageBoundary

FIRST_MASKS = MaskSource(seed=0, step=0, first_sample=0)


@frozen(eq=False, slots=False)
class NodeSegment:
    """Nodes that run together. If `recompute`, the backward pass recomputes them instead of saving activations."""

    nodes: tuple[Node, ...]
    recompute: bool
    reads: tuple[str, ...]  # values computed before the segment
    writes: tuple[str, ...]  # values read after the segment

    @cached_property
    def last_reads(self) -> tuple[tuple[str, ...], ...]:
        """Return for each node the values that nothing reads after it, so that they can be freed."""
        last = {name: i for i, n in enumerate(self.nodes) for name in (*n.inputs, n.name)}
        return tuple(
            tuple(name for name, i in last.items() if i == here and name not in self.writes)
            for here in range(len(self.nodes))
        )


class ModelChunk(MegatronModule):
    """The nodes [start, stop) of a graph as one module.

    Its inputs are the named tensors of a micro-batch, [batch ..], with this cp rank's part of each sequence, the source
    of dropout masks, and the balancing losses. It returns the hidden states that the next stage receives, packed, or on
    the last stage the values of the nodes in `returns`, by name: the loss at the end, and the losses that it adds.
    """

    def __init__(self, graph: Graph, stage: Stage, context: BuildContext, *, on_meta: bool = False) -> None:
        """Build the modules of the nodes. on_meta: parameters get no memory; one node's at a time has had some."""
        super().__init__(context.config)
        self.graph, self.groups = graph, context.groups
        self.model_type = ModelType.encoder_or_decoder
        self.vp_stage = stage.chunk if context.groups.layout.vpp > 1 else None
        self.pre_process, self.post_process = stage.start == 0, stage.stop == len(graph.nodes)
        begin, end = (StageBoundary.of(graph, node, context.split, context.seq) for node in (stage.start, stage.stop))
        self.begin, self.end = begin, end
        self.returns = losses_of(graph)
        self.writes = self.returns if self.post_process else end.names
        self.returns_predictions = False
        nodes = [n for n in graph.nodes[stage.start : stage.stop] if not n.is_input]
        self.segments = node_segments(nodes, self.writes, context.groups.layout)
        self.selective = SelectiveNodes.of(nodes, context.groups.layout.recomputed_modules)
        build = registry.build_on_meta if on_meta else registry.build_module
        self.nodes = tuple(BuiltNode(n, build(n, context), context.groups) for n in nodes)
        self.modules_by_key = nn.ModuleDict({_key(it.node): it.module for it in self.nodes})
        # They run in place of a node's module and of `run_segment`, where weights are gathered before.
        self.node_runners: dict[str, nn.Module] = {}
        self.segment_runners: tuple[Callable[..., tuple[Tensor, ...]], ...] = ()
        for it in self.nodes:
            if isinstance(it.module, Body):
                it.module.overwrites_logits = _reads_alone(graph, it.node)
        self.received: Tensor | None = None
        self.shared = SharedUses.of(graph, self.node_modules())
        self.has_frozen = any(s.frozen for s in graph.weights.values())
        self.share_embeddings_and_output_weights = False  # `SharedGradients` adds up gradients of copies

    def set_input_tensor(self, tensors: Any) -> None:
        """Set the hidden states received from the previous stage; the schedules pass a list of one tensor."""
        self.received = tensors[0] if isinstance(tensors, list | tuple) else tensors

    def node_modules(self) -> Iterator[tuple[Node, nn.Module]]:
        """Yield the nodes of this chunk, each with its module."""
        yield from ((it.node, it.module) for it in self.nodes)

    def forward(
        self, *, masks: MaskSource = FIRST_MASKS, balancing: Balancing | None = None, **inputs: Tensor
    ) -> Tensor | dict[str, Tensor]:
        values = dict(inputs)
        if not self.pre_process:
            assert self.received is not None, "the schedule sets the input tensor first"
            values.update(self.begin.unpack(self.received))
        for i, segment in enumerate(self.segments):
            run = self.segment_runners[i] if self.segment_runners else partial(self.run_segment, i)
            outputs = run(*(values[name] for name in segment.reads), masks=masks, balancing=balancing)
            values.update(zip(segment.writes, outputs, strict=True))
        return {name: values[name] for name in self.writes} if self.post_process else self.end.pack(values)

    def return_predictions(self) -> None:
        """Return what the losses read as well, such as logits. They are then held until the backward pass ends."""
        self.returns = tuple(dict.fromkeys((*self.returns, *self.graph.predictions)))
        self.returns_predictions = True
        if self.post_process:
            self.writes = self.returns
            self.segments = node_segments([it.node for it in self.nodes], self.writes, self.groups.layout)
            for it in self.nodes:
                if isinstance(it.module, Body):
                    it.module.overwrites_logits = False

    def module_of(self, node: Node) -> nn.Module:
        """Return the module of a node of this chunk."""
        return self.modules_by_key[_key(node)]

    def run_segment(
        self, index: int, *reads: Tensor, masks: MaskSource, balancing: Balancing | None
    ) -> tuple[Tensor, ...]:
        """Return the values that a segment writes, from those that it reads. Recompute, if any, is inside."""
        segment = self.segments[index]
        run = partial(self._run_nodes, segment, masks, balancing)
        if segment.recompute and torch.is_grad_enabled():
            outputs: tuple[Tensor, ...] = tensor_parallel.checkpoint(run, False, *reads)
            return outputs
        return run(*reads)

    def _run_nodes(
        self, segment: NodeSegment, masks: MaskSource, balancing: Balancing | None, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the values that the nodes of a segment write, from those that it reads."""
        values = dict(zip(segment.reads, inputs, strict=True))
        selective = SelectiveRecompute(self.selective)
        for n, last_reads in zip(segment.nodes, segment.last_reads, strict=True):
            module = self.module_of(n)
            options: dict[str, Any] = {}
            if isinstance(module, Body | HiddenDropout):
                options["masks"] = masks.of(n.name)
            if isinstance(module, Body | Mixture) and balancing:
                options["balancing"] = balancing.of(n.name)
            run = partial(self.node_runners.get(n.name, module), **options)  # recompute runs with the same options
            out = selective.run(n, run, *(values[name] for name in n.inputs))
            if self.has_frozen and torch.is_grad_enabled() and out.is_floating_point():
                # Recomputed segments and stages pass gradients on only if what enters them has gradients.
                out.requires_grad_()
            values[n.name] = out
            for name in last_reads:
                del values[name]
        return tuple(values[name] for name in segment.writes)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return this rank's shards, by NODE.PARAMETER. A checkpoint has each weight under its name in the model."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        out: dict[str, Any] = {}
        for it in self.nodes:
            key, shards = f"{prefix}{it.node.name}.", it.shards()
            if shards is None:
                state = module_state(it.module, key, sharded_offsets, metadata, self.groups)
            else:
                state = {f"{key}{name}": shard for name, shard in shards.items()}
            out |= self.shared.saved_once(it.node, state, key)
        return out

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Copy loaded parameters, by the names of `sharded_state_dict`, into the modules."""
        for it in self.nodes:
            for name, tensor in it.tensors.items():
                if (loaded := state.get(f"{it.node.name}.{name}")) is not None:
                    own_values(tensor).copy_(loaded)


def losses_of(graph: Graph) -> tuple[str, ...]:
    """Return the outputs of a graph, and the losses that they add."""
    stacked = [n for name in graph.outputs if isinstance((n := graph.nodes[graph.index[name]]).op, Stacked)]
    return (*graph.outputs, *(name for n in stacked for name in n.inputs))


def _reads_alone(graph: Graph, node: Node) -> bool:
    """Return whether one primitive of a loss alone reads the output of an Unembed, which may then be overwritten."""
    if not node.is_loss or not isinstance(graph.nodes[graph.index[node.inputs[0]]].op, Unembed):
        return False
    p = program(node)
    readers = [n for n in graph.nodes if node.inputs[0] in n.inputs]
    inside = [a for step in p.steps for a in step.value.args if a.source is p.inputs[0].source]
    return len(readers) == len(inside) == 1


def _key(node: Node) -> str:
    """Return a node's name without dots, which torch does not allow in module names."""
    return node.name.replace(".", "_")


def node_segments(nodes: list[Node], outputs: tuple[str, ...], layout: Layout) -> tuple[NodeSegment, ...]:
    """Return the nodes in segments: one per block with full recompute or gathered weights, else a single one.

    The first `recompute_layers` blocks are recomputed; all, if that is 0.
    """
    full = layout.full_recompute
    by_block = full or layout.fsdp
    segments = [tuple(g) for _, g in groupby(nodes, key=lambda n: n.block if by_block else None)]
    blocks = [segment[0].block for segment in segments if segment[0].block is not None]
    recomputed = set(blocks[: layout.recompute_layers or None]) if full else set()
    out = []
    for i, segment in enumerate(segments):
        own = {n.name for n in segment}
        reads = tuple(dict.fromkeys(name for n in segment for name in n.inputs if name not in own))
        read_later = {name for s in segments[i + 1 :] for n in s for name in n.inputs} | set(outputs)
        writes = tuple(n.name for n in segment if n.name in read_later)
        out.append(NodeSegment(segment, segment[0].block in recomputed, reads, writes))
    return tuple(out)
