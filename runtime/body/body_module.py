"""A node's own body as a torch module: what runs a layer that no other module is registered for, on any layout.

Protocol: the module holds this rank's share of each of the node's weights under its name in the layer (`q_norm.scale`)
and evaluates the primitives of the body on local tensors, with the moves that `dsl.facts.propagation` infers, which
are those that the planner counts. Inputs and the output are as `context.lying` says.

The core of attention and scans are computed again in the backward pass, rather than keeping what is between their
inputs and their output.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from attrs import define, field
from megatron.core import tensor_parallel
from torch import Tensor, nn

from megaloom.dsl import (
    Attend,
    Each,
    Layer,
    MoE,
    Node,
    Route,
    Select,
    Slot,
    Split,
    Unembed,
    UserError,
    Value,
    Weight,
)
from megaloom.dsl.facts.primitives import Program, fitted, origin, program
from megaloom.dsl.facts.propagation import (
    PlacedOp,
    Transition,
    TransitionKind,
    Transitions,
    propagate,
)
from megaloom.dsl.graph import primitives
from megaloom.dsl.sharding_table import SHARED_BY_HEADS, Sharded
from megaloom.planner.rules.padding import padding_refusal
from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.build_context import BuildContext, to_declared_order, to_megatron_order
from megaloom.runtime.megatron.recompute import DiscardedOutput
from megaloom.runtime.reference.tensors import axis

from .local_ops import hide_padding, local
from .recompute_segments import Part, parts
from .transitions import perform

EVEN = Sharded("tp")


class Body(nn.Module):
    """A node, computed as its body says."""

    def __init__(self, node: Node, context: BuildContext) -> None:
        super().__init__()
        layout, split = context.groups.layout, context.split
        self.groups, self.program = context.groups, fitted(program(node), split, SHARED_BY_HEADS)
        _trainable(node, self.program, split)
        self.placement = propagate(self.program, split)
        self.logits = isinstance(node.op, Unembed)
        self.mixture = node.op if isinstance(node.op, MoE) and node.op.balance else None
        self.placed = {id(p.step.value): p for p in self.placement.steps}
        self.parts = parts(self.program, layout.recomputed_modules)
        # Nodes that are alike have one program, whose weights come in the order of every such node's.
        held = (v for v, *_ in primitives(self.program.value) if isinstance(v.op, Weight))
        self.slots = {id(v): s for v, s in zip(held, node.weights, strict=True)}
        self.names = {i: s.name.removeprefix(f"{node.name}.") for i, s in self.slots.items()}
        sends = any(isinstance(s.value.op, Route) for s in self.program.steps)
        self.apart = self._apart() if sends else {}
        self.thin = {i: where for i, s in self.slots.items() if (where := self._thin(s)) is not None}
        for i, slot in self.slots.items():
            _hold(self, self.names[i], self._share(slot, context, i))

    def _thin(self, slot: Slot) -> int | None:
        """The place of the dim along which devices of tp keep a share each of a weight that all of them compute with:
        one of fewer key/value heads than there are devices, as megatron-core shares it out too."""
        tp = self.groups.layout.tp
        few = any(d.name in SHARED_BY_HEADS and d.known < tp and tp % d.known == 0 for d in slot.value.shape)
        if not few or slot.outer or not slot.trained:
            return None
        return next((i for i, d in enumerate(slot.dims) if d.known % tp == 0), None)

    def _apart(self) -> dict[int, bool]:
        """What is each expert's own, by the identity of the value, weights and what is made of them alone; whether all
        devices of etp have the whole of it."""
        table, plain = self.program.table, self.placement.plain
        weights = [(i, s.outer, s.value.shape) for i, s in self.slots.items()]
        made = [(id(s.value), s.outer, s.value.shape) for s in self.program.steps if id(s.value) in plain]
        return {
            i: "etp" not in table.axes(outer, shape).values()
            for i, outer, shape in (*weights, *made)
            if table.among_experts(outer)
        }

    def _share(self, slot: Slot, context: BuildContext, i: int) -> Tensor:
        """Room for this rank's share of a weight, with the marks by which `weights.share` fills it."""
        table, apart = self.program.table, i in self.apart
        axes = table.axes(slot.outer, slot.value.shape)
        if i in self.thin:
            axes[slot.dims[self.thin[i]].name] = "tp"
        degrees = [self.groups.layout.degrees.get(axes.get(d.name, ""), 1) for d in slot.dims]
        sizes = [table.dims.get(d.name, EVEN).local(d.known, n) for d, n in zip(slot.dims, degrees, strict=True)]
        values = torch.empty(sizes, dtype=context.config.params_dtype, device=device.current())
        if not slot.trained:
            return values
        p = nn.Parameter(values)
        by = "etp" if apart else "tp"
        divided = next((k for k, d in enumerate(slot.dims) if axes.get(d.name) == by and degrees[k] > 1), None)
        if apart:
            # Expert gradients are reduced over the expert process groups (see `modules.moe`). A weight that etp does
            # not divide is replicated over etp: its gradients are added there, and count once in the gradient norm.
            p.allreduce, p.shared = False, divided is None and context.groups.etp_rank > 0  # type: ignore[attr-defined]
        if apart or divided is not None:
            where = -1 if divided is None else divided
            tensor_parallel.set_tensor_model_parallel_attributes(p, True, where, 1)
        pads = (table.dims[d.name].policy == "pad" if d.name in axes else False for d in slot.dims)
        p.pad_dim = next((k for k, pad in enumerate(pads) if pad), None)  # type: ignore[attr-defined]
        p.constant = slot.value.op.std == 0  # type: ignore[attr-defined]
        return p

    @property
    def expert_weight_names(self) -> frozenset[str]:
        """The names of the weights that each expert has of its own."""
        return frozenset(name for i, name in self.names.items() if i in self.apart)

    def forward(self, *inputs: Tensor) -> Tensor:
        given = zip(self.program.inputs, inputs, strict=True)
        run = _Run(self, {id(v): to_declared_order(v, x) for v, x in given})
        run.known.update((i, self.weight(i)) for i in self.names)
        again = self.parts if torch.is_grad_enabled() else {}
        for v in (p.step.value for p in self.placement.steps if not p.step.outer):
            if id(v) not in again or v in again[id(v)].leaves:
                run.value(v)  # in program order: no recursion deeper than one primitive
        out = run.read(self.program.value, self.placement.output)
        run.free(out)
        out = hide_padding(self.program, out, self.groups) if self.logits else out
        return to_megatron_order(self.program.value, out.view_as(out))  # a view: recompute hooks stay on this tensor

    def weight(self, i: int) -> Tensor:
        """What this device computes with of a weight."""
        held = self.get_parameter_or_buffer(self.names[i])
        return (
            perform(Transition(TransitionKind.SHARD_TO_REPLICATE, "tp"), held, self.thin[i], self.groups)
            if i in self.thin
            else held
        )

    def get_parameter_or_buffer(self, name: str) -> Tensor:
        """The tensor of this name, whether it is trained or not."""
        path, _, last = name.rpartition(".")
        found = getattr(self.get_submodule(path), last)
        assert isinstance(found, Tensor)
        return found


@define(eq=False)
class _Run:
    """One evaluation: the values known so far, as they lie, and as moves have made them."""

    body: Body
    known: dict[int, Tensor]  # by the identity of the value
    moved: dict[tuple[int, Transitions], Tensor] = field(factory=dict)
    again: bool = False  # whether this evaluates a part that is computed again
    discarded: list[DiscardedOutput] = field(factory=list)

    def read(self, v: Value, moves: Transitions) -> Tensor:
        """A value after moves; each is made once."""
        if not moves:
            return self.value(v)
        key = id(origin(v)), moves
        if key not in self.moved:
            *before, last = moves
            dim = None if last.along is None else axis(v.shape, last.along)
            self.moved[key] = perform(last, self.read(v, tuple(before)), dim, self.body.groups)
        return self.moved[key]

    def value(self, v: Value) -> Tensor:
        """A value as this rank holds it."""
        if id(v) not in self.known:
            if isinstance(v.op, Each):
                self.known[id(v)] = self.copies(v)
            elif v.body is not None:
                self.known[id(v)] = self.value(v.body)
            elif id(v) in self.body.parts and torch.is_grad_enabled() and not self.again:
                self.part(self.body.parts[id(v)])
            else:
                self.known[id(v)] = self.computed(self.body.placed[id(v)])
        return self.known[id(v)]

    def part(self, part: Part) -> None:
        """What leaves a part that is computed again, from what enters it."""
        again = partial(_again, self.body, part, {i: self.known[i] for i in self.body.slots})
        given = [self.value(v) for v in part.enters]
        if part.kept:
            made = tensor_parallel.checkpoint(again, False, *given)
        else:
            self.discarded.append(DiscardedOutput())
            made = self.discarded[-1].run(again, *given)
        self.known.update((id(v), x) for v, x in zip(part.leaves, made, strict=True))

    def free(self, out: Tensor) -> None:
        """Free what is made again, as nothing but the output was made of it."""
        for part in self.discarded:
            part.free_after(out)

    def computed(self, p: PlacedOp) -> Tensor:
        v = p.step.value
        args = [self.read(a, self.needed(p, a, moves)) for a, moves in zip(v.args, p.reads, strict=True)]
        body = self.body
        out = local(p, v, *args, groups=body.groups, training=body.training, mixture=body.mixture)
        for move in p.result:
            assert move.along is not None, "a part is one of a dim"
            out = perform(move, out, axis(v.shape, move.along), self.body.groups)
        return out

    def needed(self, p: PlacedOp, v: Value, moves: Transitions) -> Transitions:
        """The moves of an argument of a primitive.

        Gradients of experts are added over tp, where it is not etp, with those of their copies. Over etp they are added
        here if all its devices have the whole: either the work is divided, or each does it for slots of its own.
        """
        whole = self.body.apart.get(id(origin(v)))
        if whole is None:
            return moves
        kept = tuple(m for m in moves if m.axis != "tp")
        alone = whole and self.body.groups.layout.etp > 1 and id(p.step.value) not in self.body.placement.plain
        return (
            (*kept, Transition(TransitionKind.TO_REPLICATE, "etp"))
            if alone and all(m.axis != "etp" for m in kept)
            else kept
        )

    def copies(self, v: Value) -> Tensor:
        """Each copy that this rank holds, with its own index of what it picks and of its weights."""
        assert isinstance(v.op, Each)
        assert v.body is not None
        dim, slots = v.shape.dims[0], self.body.slots
        steps = [self.body.placed[id(p)] for p, *_ in primitives(v) if id(p) in self.body.placed]
        own = {id(p.step.value) for p in steps} | {i for i, s in slots.items() if dim in s.outer}
        for p in steps:  # what the copies read of the outside is moved once for all of them
            for a, moves in zip(p.step.value.args, p.reads, strict=True):
                if id(origin(a)) not in own:
                    self.read(a, self.needed(p, a, moves))
        picks = [p for p in steps if p.step.value.op == Select(dim.name)]
        out = []
        for i in range(self.value(v.args[0]).shape[axis(v.args[0].shape, dim.name)]):
            copy = _Run(self.body, dict(self.known), dict(self.moved))
            for p in picks:
                (x,), (moves,) = p.step.value.args, p.reads
                copy.known[id(p.step.value)] = self.read(x, moves).select(axis(x.shape, dim.name), i)
            copy.known.update((w, self.known[w][i]) for w, s in slots.items() if dim in s.outer)
            out.append(copy.value(v.body))
            copy.free(out[-1])
        return torch.stack(out)


def _again(body: Body, part: Part, weights: dict[int, Tensor], *given: Tensor) -> tuple[Tensor, ...]:
    """What leaves a part, as often as it is computed; it holds nothing else of a run."""
    entered = zip((id(v) for v in part.enters), given, strict=True)
    run = _Run(body, {**weights, **dict(entered)}, again=True)
    return tuple(run.value(v) for v in part.leaves)


def _hold(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Make a tensor a module's parameter or buffer, of a name that may have dots."""
    *path, last = name.split(".")
    for part in path:
        if part not in dict(module.named_children()):
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(last, tensor)
    else:
        module.register_buffer(last, tensor)


def _trainable(node: Node, p: Program, split: Split) -> None:
    """Check that what a body computes can be trained like this. Raises UserError."""
    value = p.value
    at = f"{node.name} ({getattr(node.op, 'at', '')})"
    if any(isinstance(op, MoE) and op.balance for op in _layers(value) if op is not value.op):
        raise UserError(
            f"{at} has a MoE inside, whose balancing loss is not added: only that of a MoE between layers is\n"
            "balance=0 would work"
        )
    sends = any(isinstance(v.op, Route) for v, *_ in primitives(value))
    for v, _, outer in primitives(value):
        if isinstance(v.op, Attend) and v.op.dropout:
            raise UserError(
                f"{at} drops attention probabilities, which its other options exclude\ndropout=0 would work"
            )
        if split.ep * split.etp > 1 and not sends and p.table.among_experts(outer):
            raise UserError(
                f"{at} has experts to which no tokens are sent: they are not divided over "
                f"ep {split.ep} x etp {split.etp}\n"
                "ep 1 and etp 1 would work, or a MoE of them"
            )
    if refusal := padding_refusal(node, split):
        raise UserError("\n".join(refusal))


def _layers(value: Value) -> Iterator[Layer]:
    """The layers that a node's value is made by."""
    seen, todo = {id(a) for a in value.args}, [value]
    while todo:
        v = todo.pop()
        if id(v) not in seen:
            seen.add(id(v))
            if isinstance(v.op, Layer):
                yield v.op
            todo += [*v.args, *([] if v.body is None else [v.body])]
