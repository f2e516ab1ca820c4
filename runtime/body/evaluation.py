"""Evaluation of a node's body on local tensors: primitives, transitions, recompute, the copies of an `Each`.

`Evaluation(body, values).run()` returns the output. The cores of attention and scans save only their inputs for the
backward pass (see `local_ops`); the regions of `recompute_regions` save only what enters them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from attrs import define, field
from megatron.core import tensor_parallel
from torch import Tensor

from megaloom.dsl import Each, Select, Value
from megaloom.dsl.facts.primitives import origin
from megaloom.dsl.facts.propagation import PlacedOp, Transition, TransitionKind, Transitions
from megaloom.dsl.graph import primitives
from megaloom.runtime.megatron.recompute import DiscardedOutput
from megaloom.runtime.reference.tensors import dim_index

from .local_ops import evaluate_local
from .recompute_regions import RecomputeRegion
from .transitions import perform

if TYPE_CHECKING:
    from .body_module import Body


@define(eq=False)
class Evaluation:
    """One evaluation of a body. Tensors are keyed by the identity of their `Value`."""

    body: Body
    values: dict[int, Tensor]  # in the placement in which they were computed
    transitioned: dict[tuple[int, Transitions], Tensor] = field(factory=dict)  # after transitions
    in_region: bool = False  # True while a recompute region runs
    discarded: list[DiscardedOutput] = field(factory=list)

    def run(self) -> Tensor:
        """Return the output of the node."""
        regions = self.body.regions if torch.is_grad_enabled() else {}
        for v in (p.step.value for p in self.body.placement.steps if not p.step.outer):
            if id(v) not in regions or v in regions[id(v)].outputs:
                self.value(v)  # in program order, so that no recursion is deeper than one primitive
        out = self.read(self.body.program.value, self.body.placement.output)
        self.free_discarded(out)
        return out

    def read(self, v: Value, transitions: Transitions) -> Tensor:
        """Return a value after transitions. Each transition of a value is performed once."""
        if not transitions:
            return self.value(v)
        key = id(origin(v)), transitions
        if key not in self.transitioned:
            *before, last = transitions
            dim = None if last.along is None else dim_index(v.shape, last.along)
            self.transitioned[key] = perform(last, self.read(v, tuple(before)), dim, self.body.groups)
        return self.transitioned[key]

    def value(self, v: Value) -> Tensor:
        """Return a value in the placement in which its primitive leaves it."""
        if id(v) not in self.values:
            if isinstance(v.op, Each):
                self.values[id(v)] = self.stacked_copies(v)
            elif v.body is not None:
                self.values[id(v)] = self.value(v.body)
            elif id(v) in self.body.regions and torch.is_grad_enabled() and not self.in_region:
                self.run_region(self.body.regions[id(v)])
            else:
                self.values[id(v)] = self.run_op(self.body.placed_ops[id(v)])
        return self.values[id(v)]

    def run_op(self, p: PlacedOp) -> Tensor:
        """Return the result of one primitive, after the transitions of its arguments and of its result."""
        v, body = p.step.value, self.body
        args = [self.read(a, self.transitions_of(p, a, before)) for a, before in zip(v.args, p.reads, strict=True)]
        out = evaluate_local(p, v, *args, groups=body.groups, training=body.training, balanced_moe=body.balanced_moe)
        for transition in p.result:
            assert transition.along is not None, "a transition of a result names its dim"
            out = perform(transition, out, dim_index(v.shape, transition.along), body.groups)
        return out

    def transitions_of(self, p: PlacedOp, v: Value, transitions: Transitions) -> Transitions:
        """Return the transitions of an argument of a primitive that the runtime performs here.

        Gradients of expert weights are reduced over tp by the data-parallel reduction, so transitions over tp are left
        out. A weight that etp replicates has its gradient summed over etp here: its devices share the work, or each
        works on token slots of its own.
        """
        etp_replicates = self.body.expert_values.get(id(origin(v)))
        if etp_replicates is None:
            return transitions
        without_tp = tuple(t for t in transitions if t.axis != "tp")
        layout, weights_only = self.body.groups.layout, self.body.placement.weights_only
        sums_over_etp = etp_replicates and layout.etp > 1 and id(p.step.value) not in weights_only
        if sums_over_etp and all(t.axis != "etp" for t in without_tp):
            return (*without_tp, Transition(TransitionKind.TO_REPLICATE, "etp"))
        return without_tp

    def run_region(self, region: RecomputeRegion) -> None:
        """Compute the outputs of a recompute region, saving only its inputs."""
        weights = {i: self.values[i] for i in self.body.slots}
        function = partial(_region_outputs, self.body, region, weights)
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
        dim, slots = v.shape.dims[0], self.body.slots
        ops = [self.body.placed_ops[id(p)] for p, *_ in primitives(v) if id(p) in self.body.placed_ops]
        inside = {id(p.step.value) for p in ops} | {i for i, s in slots.items() if dim in s.outer}
        for p in ops:  # values from outside change their placement once, for all copies
            for a, transitions in zip(p.step.value.args, p.reads, strict=True):
                if id(origin(a)) not in inside:
                    self.read(a, self.transitions_of(p, a, transitions))
        selects = [p for p in ops if p.step.value.op == Select(dim.name)]
        out = []
        for i in range(self.value(v.args[0]).shape[dim_index(v.args[0].shape, dim.name)]):
            copy = Evaluation(self.body, dict(self.values), dict(self.transitioned))
            for p in selects:
                (x,), (transitions,) = p.step.value.args, p.reads
                copy.values[id(p.step.value)] = self.read(x, transitions).select(dim_index(x.shape, dim.name), i)
            copy.values.update((w, self.values[w][i]) for w, s in slots.items() if dim in s.outer)
            out.append(copy.value(v.body))
            copy.free_discarded(out[-1])
        return torch.stack(out)


def _region_outputs(
    body: Body, region: RecomputeRegion, weights: dict[int, Tensor], *inputs: Tensor
) -> tuple[Tensor, ...]:
    """Return the outputs of a region. It runs in the forward and the backward pass, so it keeps no evaluation alive."""
    entering = zip((id(v) for v in region.inputs), inputs, strict=True)
    evaluation = Evaluation(body, {**weights, **dict(entering)}, in_region=True)
    return tuple(evaluation.value(v) for v in region.outputs)
