"""The oracle: a model's bodies evaluated with plain torch, in one process.

Every tensor carries its dims in the order of its `Value.shape`. Clarity comes before speed here: what trains a model
(`build`) is tested against this, and this is tested against the mathematics as others wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce, singledispatch
from string import ascii_letters

import torch
import torch.nn.functional as F
from torch import Tensor

from megaloom.dsl import (
    Attend,
    Combine,
    Dot,
    Drop,
    Each,
    Gate,
    Input,
    Lookup,
    Model,
    Node,
    Normalize,
    Op,
    Pick,
    Pointwise,
    Rename,
    Rope,
    Route,
    Rows,
    Shape,
    UserError,
    Value,
    Weight,
    graph,
)
from megaloom.dsl.graph import primitives

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}
"""The functions of one argument that the dsl knows by name."""


def interpret(model: Model, weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """The model's outputs for these weights (by the names of `graph(model).weights`) and inputs, differentiably.

    Dropout is off, as in evaluation. Raises UserError when a weight or an input is missing or of another shape.
    """
    g = graph(model)
    results: dict[str, Tensor] = {}
    for node in g.nodes:
        arguments = (a for a in node.value.args if not isinstance(a.op, Weight))
        known = {id(a): results[name] for a, name in zip(arguments, node.inputs, strict=True)}
        known |= {id(s.value): _given("weight", s.name, Shape(s.dims), weights) for s in node.weights}
        if isinstance(node.op, Input):
            known[id(node.value)] = _given("input", node.op.name, node.shape, inputs)
        results[node.name] = _value(node.value, known, node)
    return tuple(results[name] for name in g.outputs)


def _given(what: str, name: str, shape: Shape, values: Mapping[str, Tensor]) -> Tensor:
    """The tensor of this name, checked against the sizes that its shape has."""
    if name not in values:
        raise UserError(f"no {what} {name!r} {shape}: there are {', '.join(values) or 'none'}")
    x = values[name]
    if len(shape.dims) != x.ndim or any(d.size not in (None, n) for d, n in zip(shape, x.shape, strict=True)):
        raise UserError(f"{what} {name!r} is {shape}, so a tensor of sizes {list(x.shape)} cannot be it")
    return x


def _value(v: Value, known: dict[int, Tensor], node: Node) -> Tensor:
    """The tensor of a value inside a node; `known` holds what is computed already, by identity."""
    if id(v) not in known:
        if isinstance(v.op, Each):
            known[id(v)] = _copies(v, known, node)
        elif v.body is not None:
            known[id(v)] = _value(v.body, known, node)
        else:
            known[id(v)] = evaluate(v.op, v, *(_value(a, known, node) for a in v.args))
    return known[id(v)]


def _copies(v: Value, known: dict[int, Tensor], node: Node) -> Tensor:
    """Each copy of an `Each` computed for itself, with its own index of what it picks and of its weights."""
    assert isinstance(v.op, Each)
    assert v.body is not None
    x, dim = _value(v.args[0], known, node), v.shape.dims[0]
    picks = [p for p, *_ in primitives(v) if p.op == Pick(dim.name)]
    copied = [id(s.value) for s in node.weights if dim in s.outer]
    out = []
    for i in range(dim.known):
        inside = {**known, **{id(p): x.select(_axis(v.args[0].shape, dim.name), i) for p in picks}}
        inside |= {w: known[w][i] for w in copied}
        out.append(_value(v.body, inside, node))
    return torch.stack(out)


@singledispatch
def evaluate(op: Op, out: Value, *args: Tensor) -> Tensor:
    """The result `out` of a primitive for these arguments, in the order of dims that `out.shape` says.

    An op of one's own joins by `@evaluate.register`.
    """
    raise UserError(f"interpret has no meaning for {type(op).__name__}: give it one with @evaluate.register")


@evaluate.register
def _(op: Dot, out: Value, *args: Tensor) -> Tensor:
    x, w = (_names(a.shape) for a in out.args)
    return _einsum(args[0], x, args[1], w, _names(out.shape))


@evaluate.register
def _(op: Pointwise, out: Value, *args: Tensor) -> Tensor:
    x, *rest = (_broadcast(t, a.shape, out.shape) for t, a in zip(args, out.args, strict=True))
    match op.fn:
        case "add":
            return sum(rest, start=x)
        case "mul":
            return reduce(torch.mul, rest, x)
    return UNARY[op.fn](x)


@evaluate.register
def _(op: Drop, out: Value, *args: Tensor) -> Tensor:
    return args[0]


@evaluate.register
def _(op: Normalize, out: Value, *args: Tensor) -> Tensor:
    x, *weights = args
    axis = _axis(out.shape, op.over)
    if op.centred:
        x = x - x.mean(axis, keepdim=True)
    y = x * torch.rsqrt(x.square().mean(axis, keepdim=True) + op.eps)
    scale, *shift = (_broadcast(w, a.shape, out.shape) for w, a in zip(weights, out.args[1:], strict=True))
    return sum(shift, start=y * scale)


@evaluate.register
def _(op: Lookup, out: Value, *args: Tensor) -> Tensor:
    indices, table = args
    return table.movedim(_axis(out.args[1].shape, op.key), 0)[indices]


@evaluate.register
def _(op: Rows, out: Value, *args: Tensor) -> Tensor:
    x, table = args
    count = x.shape[_axis(out.args[0].shape, "seq")]
    rows = table.movedim(_axis(out.args[1].shape, op.key), 0)
    if count > len(rows):
        raise UserError(f"a table {out.args[1].shape} has no rows for {count} positions: seq can be up to {len(rows)}")
    return rows[:count]


@evaluate.register
def _(op: Rope, out: Value, *args: Tensor) -> Tensor:
    (x,) = args
    shape = out.shape
    half = shape["head_dim"].known // 2
    place = torch.arange(x.shape[_axis(shape, "seq")], device=x.device, dtype=torch.float64)
    speed = op.theta ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = _broadcast(torch.outer(place, speed), Shape((shape["seq"], shape["head_dim"])), shape)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, dim=(axis := _axis(shape, "head_dim")))
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=axis)


@evaluate.register
def _(op: Attend, out: Value, *args: Tensor) -> Tensor:
    q, k, v = args
    query, key, value = (_names(a.shape) for a in out.args)
    group = q.shape[query.index("heads")] // k.shape[key.index("kv_heads")]
    k, v = (t.repeat_interleave(group, names.index("kv_heads")) for t, names in ((k, key), (v, value)))
    (seq,) = (name for name in key if name not in ("batch", "kv_heads", "head_dim"))
    meant = {seq: "keys", "kv_heads": "heads"}  # each query head now has a key head of its own
    key, value = ([meant.get(name, name) for name in names] for names in (key, value))
    over = [name for name in query if name not in ("seq", "head_dim")]
    scores = _einsum(q, query, k, key, [*over, "seq", "keys"]) / q.shape[query.index("head_dim")] ** 0.5
    if op.causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return _einsum(scores.softmax(-1), [*over, "seq", "keys"], v, value, _names(out.shape))


@evaluate.register
def _(op: Gate, out: Value, *args: Tensor) -> Tensor:
    (scores,) = args
    axis = _axis(out.shape, "experts")
    best, which = scores.topk(op.top_k, axis)
    return torch.zeros_like(scores).scatter(axis, which, best.softmax(axis))


@evaluate.register
def _(op: Route, out: Value, *args: Tensor) -> Tensor:
    x = _broadcast(args[0], out.args[0].shape, [*_tokens(out.args[1]), "embed"])
    return x.flatten(0, -2)[_slots(_by_expert(args[1], out.args[1]))]


@evaluate.register
def _(op: Combine, out: Value, *args: Tensor) -> Tensor:
    y, gate = args[0], _by_expert(args[1], out.args[1])
    slots = _slots(gate)
    y = y * gate.gather(1, slots)[..., None]
    sums = y.new_zeros(gate.shape[1], y.shape[-1]).index_add(0, slots.flatten(), y.flatten(0, 1))
    sizes = [args[1].shape[_axis(out.args[1].shape, name)] for name in _tokens(out.args[1])]
    return sums.unflatten(0, sizes)


@evaluate.register
def _(op: Rename, out: Value, *args: Tensor) -> Tensor:
    return args[0]


def _tokens(gate: Value) -> list[str]:
    """The dims that tell one token from another."""
    return _names(gate.shape.without("experts"))


def _by_expert(gate: Tensor, value: Value) -> Tensor:
    """The gate as [experts tokens]."""
    return _broadcast(gate, value.shape, ["experts", *_tokens(value)]).flatten(1)


def _slots(gate: Tensor) -> Tensor:
    """The tokens of each expert, [experts slots], from a gate [experts tokens].

    An expert has as many slots as the busiest one. Those it does not need hold tokens that it was not chosen
    for: their gate is zero, so they add nothing.
    """
    chosen = gate != 0
    return chosen.int().argsort(dim=1, descending=True, stable=True)[:, : int(chosen.sum(1).max())]


def _names(shape: Shape) -> list[str]:
    return [d.name for d in shape]


def _axis(shape: Shape, name: str) -> int:
    return _names(shape).index(name)


def _broadcast(x: Tensor, have: Shape, want: Shape | Sequence[str]) -> Tensor:
    """x with its dims in the order wanted, and a dim of size 1 for each that it lacks."""
    names, want = _names(have), _names(want) if isinstance(want, Shape) else want
    x = x.permute([names.index(name) for name in want if name in names])
    return x[tuple(slice(None) if name in names else None for name in want)]


def _einsum(x: Tensor, xs: list[str], y: Tensor, ys: list[str], out: list[str]) -> Tensor:
    """torch.einsum by names of dims instead of letters."""
    letters = dict(zip(dict.fromkeys((*xs, *ys)), ascii_letters, strict=False))
    left, right, result = ("".join(letters[name] for name in names) for names in (xs, ys, out))
    return torch.einsum(f"{left},{right}->{result}", x, y)
