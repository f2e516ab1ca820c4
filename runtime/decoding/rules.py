"""Rules by which ops go on at the next position: tensors that they keep of earlier ones, and results from these.

An op that mixes positions has a `Rule`. All others compute each position by itself, which `mixing` checks. For an op of
your own that mixes positions, register a rule: `RULES[MyOp] = Rule(begin, advance)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from attrs import frozen
from torch import Tensor

from megaloom.dsl import Attend, Conv, DocumentPositions, Rope, Scan, Shift, Value
from megaloom.dsl.facts.placement import PlacedOp
from megaloom.dsl.op import Op
from megaloom.dsl.ops.attention_core import sequence_dim
from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.process_groups import ProcessGroups
from megaloom.runtime.reference.rotary import frequencies, rotated, rotation_at
from megaloom.runtime.reference.tensors import broadcast, dim_index, names

from .kept import Columns, Kept, Rows, State
from .new_query import NewQuery, keys_and_values

Begin = Callable[[Value, tuple[Tensor, ...]], Kept | None]
"""From an op's value and its arguments at all positions of a prompt: what it keeps."""
RuleStep = Callable[[Rows, Kept | None, tuple[Tensor, ...]], Tensor]
"""From the rows, what an op keeps, and its arguments at the newest position: its result there. It updates what is kept.

Updates are in place, and nothing depends on numbers that the host reads, so that a CUDA graph can repeat a step.
"""
Advance = Callable[[PlacedOp, ProcessGroups], RuleStep]
"""From a primitive and the process groups of this rank: the function that computes it at the newest position."""


@frozen
class Rule:
    """The rule by which an op goes on at the next position."""

    begin: Begin
    advance: Advance


def _attend_begin(v: Value, args: tuple[Tensor, ...]) -> Kept | None:
    op = cast(Attend, v.op)
    queries, keys = (sequence_dim(a.shape).name for a in v.args[:2])
    return Columns.of(*keys_and_values(v, args), window=op.window) if queries == keys else None


def _attend(p: PlacedOp, groups: ProcessGroups) -> RuleStep:
    query = NewQuery.of(p, groups)

    def step(rows: Rows, kept: Kept | None, args: tuple[Tensor, ...]) -> Tensor:
        if isinstance(kept, Columns):
            return query.to_kept(rows, kept, args)
        return query.to_source(rows, args)

    return step


def _nothing(v: Value, args: tuple[Tensor, ...]) -> Kept | None:
    return None


def _rope(p: PlacedOp, groups: ProcessGroups) -> RuleStep:
    v = p.step.value
    op, dims = cast(Rope, v.op), ["batch", sequence_dim(v.shape).name, "head_dim"]
    each = frequencies(op, op.rotated_channels(v.shape), device.current())
    dim = dim_index(v.shape, "head_dim")

    def step(rows: Rows, kept: Kept | None, args: tuple[Tensor, ...]) -> Tensor:
        (x,) = args
        key = id(each), op.magnitude, v.shape.names, x.dtype

        def rotation() -> list[Tensor]:
            return [broadcast(t, dims, v.shape) for t in rotation_at(op, each, rows.positions, x.dtype)]

        cos, sin = rows.once(key, rotation)
        return rotated(x, cos, sin, dim, op.interleaved)

    return step


def _document_positions(p: PlacedOp, groups: ProcessGroups) -> RuleStep:
    v = p.step.value
    op = cast(DocumentPositions, v.op)
    return lambda rows, kept, args: broadcast(rows.positions + op.first, ["batch", op.along], v.shape)


def _last(x: Tensor, count: int) -> State:
    """Return the last positions of x [rows, positions, ..], after zeros if it has fewer."""
    missing = max(0, count - x.shape[1])
    zeros = x.new_zeros(len(x), missing, *x.shape[2:])
    return State(torch.cat((zeros, x[:, x.shape[1] - (count - missing) :]), 1))


def _conv_order(v: Value) -> tuple[list[str], list[str]]:
    """Return the dims of a convolution's input, and of its kernel, in the order of computation."""
    op = cast(Conv, v.op)
    channels = names(v.shape.without("batch", op.along))
    return ["batch", op.along, *channels], ["width", *channels]


def _conv_begin(v: Value, args: tuple[Tensor, ...]) -> Kept | None:
    order, _ = _conv_order(v)
    return _last(broadcast(args[0], v.args[0].shape, order), v.args[1].shape["width"].known - 1)


def _conv(p: PlacedOp, groups: ProcessGroups) -> RuleStep:
    v = p.step.value
    order, kernel_order = _conv_order(v)

    def step(rows: Rows, kept: Kept | None, args: tuple[Tensor, ...]) -> Tensor:
        assert isinstance(kept, State)
        x = torch.cat((kept.values, broadcast(args[0], v.args[0].shape, order)), 1)
        kept.write(x[:, 1:])
        y = (x * broadcast(args[1], v.args[1].shape, kernel_order)).sum(1, keepdim=True)
        return broadcast(y, order, v.shape)

    return step


def _scan_args(v: Value, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return x [rows, seq, groups, heads, head_dim], log decays and dt [rows, seq, groups, heads], b and c, in fp32."""
    op = cast(Scan, v.op)
    order, state = ["batch", op.along, "heads", "head_dim"], ["batch", op.along, "groups", "state"]
    orders = (order, order[:3], ["heads"], state, state)
    x, dt, a, b, c = (broadcast(t, w.shape, dims).float() for t, w, dims in zip(args, v.args, orders, strict=True))
    groups = b.shape[2]
    decay = (dt * a).unflatten(2, (groups, -1))
    return x.unflatten(2, (groups, -1)), decay, dt.unflatten(2, (groups, -1)), b, c


def _scan_begin(v: Value, args: tuple[Tensor, ...]) -> Kept | None:
    """Return the state after the last position: Σ_m exp(Σ_{j > m} dt_j a) dt_m x_m b_mᵀ."""
    x, decay, dt, b, _ = _scan_args(v, args)
    sums = decay.cumsum(1)
    remaining = (sums[:, -1:] - sums).exp()
    return State(torch.einsum("blghp,blgn->bghpn", x * (dt * remaining)[..., None], b))


def _scan(p: PlacedOp, groups: ProcessGroups) -> RuleStep:
    v = p.step.value
    op = cast(Scan, v.op)

    def step(rows: Rows, kept: Kept | None, args: tuple[Tensor, ...]) -> Tensor:
        assert isinstance(kept, State)
        x, decay, dt, b, c = (t[:, 0] for t in _scan_args(v, args))
        added = (x * dt[..., None])[..., None] * b[:, :, None, None]
        kept.write(kept.values * decay.exp()[..., None, None] + added)
        y = (kept.values * c[:, :, None, None]).sum(-1).flatten(1, 2)[:, None].to(args[0].dtype)
        return broadcast(y, ["batch", op.along, "heads", "head_dim"], v.shape)

    return step


def _shift_order(v: Value) -> list[str]:
    op = cast(Shift, v.op)
    return ["batch", op.along, *names(v.shape.without("batch", op.along))]


def _shift_begin(v: Value, args: tuple[Tensor, ...]) -> Kept | None:
    return _last(broadcast(args[0], v.args[0].shape, _shift_order(v)), -cast(Shift, v.op).by)


def _shift(p: PlacedOp, groups: ProcessGroups) -> RuleStep:
    v = p.step.value
    order = _shift_order(v)

    def step(rows: Rows, kept: Kept | None, args: tuple[Tensor, ...]) -> Tensor:
        assert isinstance(kept, State)
        x = torch.cat((kept.values, broadcast(args[0], v.args[0].shape, order)), 1)
        kept.write(x[:, 1:])
        return broadcast(x[:, :1], order, v.shape)

    return step


RULES: dict[type[Op], Rule] = {
    Attend: Rule(_attend_begin, _attend),
    Rope: Rule(_nothing, _rope),
    DocumentPositions: Rule(_nothing, _document_positions),
    Conv: Rule(_conv_begin, _conv),
    Scan: Rule(_scan_begin, _scan),
    Shift: Rule(_shift_begin, _shift),
}
"""The rules of ops that mix positions."""
