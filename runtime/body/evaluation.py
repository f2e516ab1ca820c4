"""Evaluation of a node's body on local tensors: primitives, transitions, recompute, the copies of an `Each`.

`Evaluation(local, values, masks).run()` returns the output. The cores of attention and scans save only their inputs
for the backward pass (see `runtime.ops`); the regions of `recompute_regions` save only what enters them.
"""

from __future__ import annotations

from functools import partial

import torch
from attrs import define, field, frozen
from megatron.core import tensor_parallel
from torch import Tensor

from megaloom.dsl import CrossEntropy, Dim, Each, Gate, LogSumExp, MoE, Select, Slot, Value
from megaloom.dsl.facts.context_exchange import channel_dim, channels_on_device
from megaloom.dsl.facts.placement import INVARIANT, REPLICATE, NodePlacement, PlacedOp, Transition, Transitions
from megaloom.dsl.facts.primitives import Program, origin
from megaloom.dsl.node import primitives
from megaloom.dsl.sharding_table import SEQUENCES
from megaloom.planner.contract.capability import CoreKernel
from megaloom.runtime.megatron.process_groups import ProcessGroups
from megaloom.runtime.megatron.recompute import DiscardedOutput
from megaloom.runtime.ops.dropout_masks import MaskSource
from megaloom.runtime.ops.registry import local_function
from megaloom.runtime.ops.tensors import dim_index

from .balancing_loss import Balancing
from .channel_exchange import channel_shard, channels_to_sequence, sequence_to_channels
from .rank_op import RankOp
from .recompute_regions import RecomputeRegion
from .transitions import perform


@frozen(eq=False)
class LocalProgram:
    """The program of a node on one rank, equal for all evaluations. Keys are identities of the program's values."""

    program: Program
    placement: NodePlacement
    slots: dict[int, Slot]  # of the weights
    expert_values: dict[int, bool]  # tensors that each expert has of its own; True if etp replicates the tensor
    regions: dict[int, RecomputeRegion]  # of recomputed primitives
    kernels: dict[int, CoreKernel]  # of attention cores, scans and convolutions
    balanced_moe: MoE | None  # the MoE whose balancing loss is added
    groups: ProcessGroups
    dropouts: dict[int, int]  # the number of each primitive with dropout
    by_channel: frozenset[int]  # values of which each context-parallel rank has whole sequences of some channels
    routed: dict[int, Tensor] = field(factory=dict)  # tokens of each expert since the last step, by corrected gate
    placed_ops: dict[int, PlacedOp] = field(init=False)

    @placed_ops.default
    def _placed_ops(self) -> dict[int, PlacedOp]:
        return {id(p.step.value): p for p in self.placement.steps}

    @property
    def corrected_gates(self) -> list[Value]:
        """Return the gates whose correction each step moves."""
        return [p.step.value for p in self.placement.steps if id(p.step.value) in self.routed]

    def channels_on_device(self, d: Dim) -> int:
        """Return the channels of a dim on one rank of the tp axis."""
        return channels_on_device(self.program, d, self.groups.layout.split)


@define(eq=False)
class Evaluation:
    """One evaluation of a node. Tensors are keyed by the identity of their `Value`."""

    local: LocalProgram
    values: dict[int, Tensor]  # in the placement in which they were computed
    masks: MaskSource | None  # of dropout; None in an evaluation
    balancing: Balancing | None = None  # balancing losses of the micro-batch
    overwrites_logits: bool = False  # nothing but this loss reads the logits, and an Unembed hides their padding
    transitioned: dict[tuple[int, Transitions], Tensor] = field(factory=dict)  # after transitions
    exchanged: dict[tuple[int, bool], Tensor] = field(factory=dict)  # True: in channel shards, else sequence shards
    in_region: bool = False  # True while a recompute region runs
    discarded: list[DiscardedOutput] = field(factory=list)

    def run(self) -> Tensor:
        """Return the output of the node."""
        regions = self.local.regions if torch.is_grad_enabled() else {}
        for v in (p.step.value for p in self.local.placement.steps if not p.step.outer):
            if id(v) not in regions or v in regions[id(v)].outputs:
                self.value(v)  # in program order, so that no recursion is deeper than one primitive
        out = self.argument(None, self.local.program.value, self.local.placement.output)
        self.free_discarded(out)
        return out

    def argument(self, reader: Value | None, v: Value, transitions: Transitions, *, contiguous: bool = True) -> Tensor:
        """Return an argument of a primitive in the shards that it computes in. reader: None for the node's output."""
        inside, from_inside = id(reader) in self.local.by_channel, id(v.source) in self.local.by_channel
        if not inside and not from_inside:
            return self.read(v, transitions, contiguous=contiguous)
        others = tuple(t for t in transitions if t.axis != "cp" and self.local.groups.of_axis(t.axis).size() > 1)
        if inside and from_inside:
            assert not others, f"{v} has transitions between channel shards: {others}"
            return self.value(v)
        key = id(origin(v)), inside
        if key not in self.exchanged:
            x = self.read(v, others) if inside else self.value(v)
            self.exchanged[key] = self.exchange(v, x, to_channels=inside)
        x = self.exchanged[key]
        for t in () if inside else others:
            x = self.performed(t, v, x)
        return x

    def performed(self, transition: Transition, v: Value, x: Tensor) -> Tensor:
        """Return the tensor of a value after a transition."""
        dim = dim_index(v.shape, transition.shard.dim) if transition.shard else None
        return perform(transition, x, dim, self.local.groups)

    def exchange(self, v: Value, x: Tensor, *, to_channels: bool) -> Tensor:
        """Return a value in channel shards instead of sequence shards, or the other way round."""
        d, group = channel_dim(self.local.program, v), self.local.groups.of_axis("cp")
        if d is None:
            return x  # a weight that all channels share
        channels = dim_index(v.shape, d.name)
        seq = next((i for i, dim in enumerate(v.shape) if dim.name in SEQUENCES), None)
        if seq is None:
            return channel_shard(x, channels, group)
        if to_channels:
            return sequence_to_channels(x, seq, channels, group)
        return channels_to_sequence(x, seq, channels, self.local.channels_on_device(d), group)

    def read(self, v: Value, transitions: Transitions, *, contiguous: bool = True) -> Tensor:
        """Return a value after transitions. Each transition of a value is performed once.

        contiguous: an input is made contiguous for all its readers, since products would each copy it.
        """
        if not transitions:
            if contiguous and any(v is x for x in self.local.program.inputs):
                self.values[id(v)] = self.values[id(v)].contiguous()
            return self.value(v)
        key = id(origin(v)), transitions
        if key not in self.transitioned:
            *before, last = transitions
            self.transitioned[key] = self.performed(last, v, self.read(v, tuple(before))).contiguous()
        return self.transitioned[key]

    def value(self, v: Value) -> Tensor:
        """Return a value in the placement in which its primitive leaves it."""
        if id(v) not in self.values:
            if isinstance(v.op, Each):
                self.values[id(v)] = self.stacked_copies(v)
            elif v.body is not None:
                self.values[id(v)] = self.value(v.body)
            elif id(v) in self.local.regions and torch.is_grad_enabled() and not self.in_region:
                self.run_region(self.local.regions[id(v)])
            else:
                self.values[id(v)] = self.run_op(self.local.placed_ops[id(v)])
        return self.values[id(v)]

    def run_op(self, p: PlacedOp) -> Tensor:
        """Return the result of one primitive, after the transitions of its arguments and of its result."""
        v = p.step.value
        contiguous = not isinstance(v.op, CrossEntropy | LogSumExp)  # which read logits in the order of the modules
        args = [
            self.argument(v, a, self.transitions_of(p, a, before), contiguous=contiguous)
            for a, before in zip(v.args, p.reads, strict=True)
        ]
        out = self.computed(p, *args)
        if id(v) in self.local.routed and self.masks and torch.is_grad_enabled():  # once, if it is recomputed
            tokens = [i for i, name in enumerate(v.shape.names) if name != "experts"]
            self.local.routed[id(v)] += (out.detach() != 0).sum(tokens)
        for transition in () if id(v) in self.local.by_channel else p.result:
            out = self.performed(transition, v, out)
        return out

    def computed(self, p: PlacedOp, *args: Tensor) -> Tensor:
        """Return what a primitive computes from these arguments, before the transitions of its result."""
        v, moe = p.step.value, self.local.balanced_moe
        out = local_function(self.rank_op(p))(*args)
        if isinstance(v.op, Gate) and moe and self.balancing and not p.step.outer:
            return self.balancing.attach_to_gate(moe, p, self.local.groups, args[0], out)
        return out

    def rank_op(self, p: PlacedOp) -> RankOp:
        """Return a primitive on this rank."""
        i, local = id(p.step.value), self.local
        dropout, kernel = local.dropouts.get(i, 0), local.kernels.get(i)
        return RankOp(p, local.groups, self.masks, dropout, kernel, self.overwrites_logits)

    def transitions_of(self, p: PlacedOp, v: Value, transitions: Transitions) -> Transitions:
        """Return the transitions of an argument of a primitive that the runtime performs here.

        Gradients of expert weights are reduced over tp by the data-parallel reduction, so transitions over tp are left
        out. A weight that etp replicates has its gradient summed over etp here: its devices share the work, or each
        works on token slots of its own.
        """
        etp_replicates = self.local.expert_values.get(id(origin(v)))
        if etp_replicates is None:
            return transitions
        without_tp = tuple(t for t in transitions if t.axis != "tp")
        layout, weights_only = self.local.groups.layout, self.local.placement.weights_only
        sums_over_etp = etp_replicates and layout.etp > 1 and id(p.step.value) not in weights_only
        if sums_over_etp and all(t.axis != "etp" for t in without_tp):
            return (*without_tp, Transition("etp", INVARIANT, REPLICATE))
        return without_tp

    def run_region(self, region: RecomputeRegion) -> None:
        """Compute the outputs of a recompute region, saving only its inputs."""
        weights = {i: self.values[i] for i in self.local.slots}
        function = partial(_region_outputs, self.local, region, weights, self.masks, self.balancing)
        inputs = [self.value(v) for v in region.inputs]
        if region.output_saved:
            outputs = tensor_parallel.checkpoint(function, False, *inputs)
        else:
            self.discarded.append(DiscardedOutput())
            outputs = self.discarded[-1].run(function, *inputs)
        self.values.update((id(v), x) for v, x in zip(region.outputs, outputs, strict=True))

    def free_discarded(self, out: Tensor) -> None:
        """Free the outputs of regions. Everything computed from them must lead to `out`."""
        for discarded in self.discarded:
            discarded.free_after(out)

    def stacked_copies(self, v: Value) -> Tensor:
        """Return the results of the local copies of an `Each`, stacked. Copy i reads index i of its weights."""
        assert isinstance(v.op, Each)
        assert v.body is not None
        dim, slots = v.shape.dims[0], self.local.slots
        ops = [self.local.placed_ops[id(p)] for p, *_ in primitives(v) if id(p) in self.local.placed_ops]
        inside = {id(p.step.value) for p in ops} | {i for i, s in slots.items() if dim in s.outer}
        for p in ops:  # values from outside change their placement once, for all copies
            for a, transitions in zip(p.step.value.args, p.reads, strict=True):
                if id(origin(a)) not in inside:
                    self.read(a, self.transitions_of(p, a, transitions))
        selects = [p for p in ops if p.step.value.op == Select(dim.name)]
        out = []
        for i in range(self.value(v.args[0]).shape[dim_index(v.args[0].shape, dim.name)]):
            copy = Evaluation(self.local, dict(self.values), self.masks, transitioned=dict(self.transitioned))
            for p in selects:
                (x,), (transitions,) = p.step.value.args, p.reads
                copy.values[id(p.step.value)] = self.read(x, transitions).select(dim_index(x.shape, dim.name), i)
            copy.values.update((w, self.values[w][i]) for w, s in slots.items() if dim in s.outer)
            out.append(copy.value(v.body))
            copy.free_discarded(out[-1])
        return torch.stack(out)


def _region_outputs(
    local: LocalProgram,
    region: RecomputeRegion,
    weights: dict[int, Tensor],
    masks: MaskSource | None,
    balancing: Balancing | None,
    *inputs: Tensor,
) -> tuple[Tensor, ...]:
    """Return the outputs of a region. It runs in the forward and the backward pass, so it keeps no evaluation alive."""
    entering = zip((id(v) for v in region.inputs), inputs, strict=True)
    evaluation = Evaluation(local, {**weights, **dict(entering)}, masks, balancing, in_region=True)
    return tuple(evaluation.value(v) for v in region.outputs)
