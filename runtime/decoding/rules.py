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
from megaloom.dsl.ops.attention_core import sequence_dim
from megaloom.dsl.value import Op
from megaloom.runtime.megatron.process_groups import ProcessGroups
from megaloom.runtime.reference.rotary import rotate_at
from megaloom.runtime.reference.tensors import broadcast, names

from .kept import Columns, Kept, Rows, State
from .new_query import attend_to_kept, attend_to_source, keys_and_values


@frozen(eq=False)
class Call:
    """A primitive at one position of each row."""

    placed: PlacedOp
    groups: ProcessGroups
    rows: Rows  # as they are after this position

    @property
    def value(self) -> Value:
        """Return the value that the primitive computes."""
        return self.placed.step.value


Begin = Callable[[Value, tuple[Tensor, ...]], Kept | None]
"""From an op's value and its arguments at all positions of a prompt: what it keeps."""
Advance = Callable[[Call, tuple[Tensor, ...], Kept | None], tuple[Tensor, Kept | None]]
"""From an op's arguments at one position and what it kept: its result there, and what it keeps then."""


@frozen
class Rule:
    """The rule by which an op goes on at the next position."""

    begin: Begin
    advance: Advance


def _attend_begin(v: Value, args: tuple[Tensor, ...]) -> Kept | None:
    op = cast(Attend, v.op)
    queries, keys = (sequence_dim(a.shape).name for a in v.args[:2])
    if queries != keys:
        return None
    return Columns.of(*keys_and_values(v, args), window=None if op.window is None else op.window - 1)


def _attend_step(call: Call, args: tuple[Tensor, ...], kept: Kept | None) -> tuple[Tensor, Kept | None]:
    if isinstance(kept, Columns):
        return attend_to_kept(call.placed, call.groups, call.rows, kept, args), kept
    return attend_to_source(call.placed, call.groups, call.rows, args), None


def _nothing(v: Value, args: tuple[Tensor, ...]) -> Kept | None:
    return None


def _positions(call: Call) -> Tensor:
    """Return the position of each row's token, [rows, 1]."""
    return (call.rows.lengths - 1)[:, None]


def _rope_step(call: Call, args: tuple[Tensor, ...], kept: Kept | None) -> tuple[Tensor, Kept | None]:
    return rotate_at(cast(Rope, call.value.op), call.value.shape, args[0], _positions(call)), None


def _document_step(call: Call, args: tuple[Tensor, ...], kept: Kept | None) -> tuple[Tensor, Kept | None]:
    op = cast(DocumentPositions, call.value.op)
    return broadcast(_positions(call) + op.first, ["batch", op.along], call.value.shape), None


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


def _conv_step(call: Call, args: tuple[Tensor, ...], kept: Kept | None) -> tuple[Tensor, Kept | None]:
    v, (order, kernel_order) = call.value, _conv_order(call.value)
    assert isinstance(kept, State)
    x = torch.cat((kept.values, broadcast(args[0], v.args[0].shape, order)), 1)
    y = (x * broadcast(args[1], v.args[1].shape, kernel_order)).sum(1, keepdim=True)
    return broadcast(y, order, v.shape), State(x[:, 1:])


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


def _scan_step(call: Call, args: tuple[Tensor, ...], kept: Kept | None) -> tuple[Tensor, Kept | None]:
    assert isinstance(kept, State)
    x, decay, dt, b, c = (t[:, 0] for t in _scan_args(call.value, args))
    added = (x * dt[..., None])[..., None] * b[:, :, None, None]
    state = kept.values * decay.exp()[..., None, None] + added
    y = (state * c[:, :, None, None]).sum(-1).flatten(1, 2)[:, None].to(args[0].dtype)
    op = cast(Scan, call.value.op)
    return broadcast(y, ["batch", op.along, "heads", "head_dim"], call.value.shape), State(state)


def _shift_order(v: Value) -> list[str]:
    op = cast(Shift, v.op)
    return ["batch", op.along, *names(v.shape.without("batch", op.along))]


def _shift_begin(v: Value, args: tuple[Tensor, ...]) -> Kept | None:
    return _last(broadcast(args[0], v.args[0].shape, _shift_order(v)), -cast(Shift, v.op).by)


def _shift_step(call: Call, args: tuple[Tensor, ...], kept: Kept | None) -> tuple[Tensor, Kept | None]:
    v, order = call.value, _shift_order(call.value)
    assert isinstance(kept, State)
    x = torch.cat((kept.values, broadcast(args[0], v.args[0].shape, order)), 1)
    return broadcast(x[:, :1], order, v.shape), State(x[:, 1:])


RULES: dict[type[Op], Rule] = {
    Attend: Rule(_attend_begin, _attend_step),
    Rope: Rule(_nothing, _rope_step),
    DocumentPositions: Rule(_nothing, _document_step),
    Conv: Rule(_conv_begin, _conv_step),
    Scan: Rule(_scan_begin, _scan_step),
    Shift: Rule(_shift_begin, _shift_step),
}
"""The rules of ops that mix positions."""
