"""Ops of a user's own, drawn from templates, each with its true reads and with all that claim less.

An op applies stages to its first argument, one after the other, and then joins the second one. `true_reads` follows the
stages; `lies` are the true reads with one statement left out or weakened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import ClassVar

import torch
from attrs import evolve, frozen
from torch import Tensor

from megaloom.dsl import Dim, DType, Op, Reads, Shape, ShapeError, Value, WorkKind
from megaloom.runtime.ops import whole

NEW, OLD_AND_NEW = Dim("powers", 4), ("ff", "renamed")


@frozen
class Stage:
    """A function of one argument along one of its dims; number: of a shift, of a window, of indices in a group."""

    kind: str
    dim: str
    number: int = 1


Along = Callable[[Tensor, int, int], Tensor]


def _positions(x: Tensor, i: int) -> Tensor:
    return torch.arange(x.shape[i], dtype=x.dtype).view([-1 if k == i else 1 for k in range(x.ndim)])


def _window_mean(x: Tensor, i: int, width: int) -> Tensor:
    sums = torch.cat((torch.zeros_like(x.narrow(i, 0, 1)), x.cumsum(i)), i)
    last = torch.arange(1, x.shape[i] + 1)
    return (sums.index_select(i, last) - sums.index_select(i, (last - width).clamp(min=0))) / width


def _group_mean(x: Tensor, i: int, size: int) -> Tensor:
    return x.unflatten(i, (-1, size)).mean(i + 1, keepdim=True).expand(_expanded(x, i, size)).flatten(i, i + 1)


def _expanded(x: Tensor, i: int, size: int) -> list[int]:
    return [*x.shape[:i], x.shape[i] // size, size, *x.shape[i + 1 :]]


WHOLE: Mapping[str, Along] = {  # along the dim an element reads others
    "cumsum": lambda x, i, n: x.cumsum(i) / 4,
    "roll": lambda x, i, n: x.roll(n, i),
    "softmax": lambda x, i, n: x.softmax(i),
    "reverse": lambda x, i, n: x.flip(i),
    "window": _window_mean,
    "groups": _group_mean,
}
OFFSET: Mapping[str, Along] = {"position": lambda x, i, n: x * (1 + 0.1 * _positions(x, i))}
PLAIN: Mapping[str, Along] = {"tanh": lambda x, i, n: x.tanh(), "exp": lambda x, i, n: (x / 4).exp()}
SUM: Mapping[str, Along] = {"sum": lambda x, i, n: x.sum(i)}
KINDS = {**WHOLE, **OFFSET, **PLAIN, **SUM}
NONLINEAR = {"softmax", "tanh", "exp"}
OF_ZERO = {"softmax", "exp"}  # which are not 0
JOINS = ("", "", "product", "outer", "contract", "take", "new", "rename")


@frozen
class DrawnOp(Op):
    """Stages along dims of the first argument, then a join.

    product: times the second argument. outer: times one with another dim. contract: the sum over the first channels
    with a table. take: the positions of ids. new: times the powers of a new dim. rename: ff has another name.
    """

    stages: tuple[Stage, ...]
    join: str = ""
    claims: tuple[Reads, ...] | None = None
    work_kind: ClassVar[WorkKind] = WorkKind.MEMORY

    def shape(self, *args: Shape) -> Shape:
        shape = args[0]
        for s in self.stages:
            size = shape[s.dim].size
            if s.kind == "groups" and size is not None and size % s.number:
                raise ShapeError(f"{shape[s.dim]} is not a multiple of {s.number}")
            shape = shape.without(s.dim) if s.kind == "sum" else shape
        match self.join:
            case "product" | "outer":
                return Shape((*shape, *(d for d in args[1] if d.name not in shape)))
            case "contract":
                key = args[1].dims[0].name
                if shape[key] != args[1][key]:
                    raise ShapeError(f"{shape[key]} is not {args[1][key]}")
                return Shape((*shape.without(key), args[1].dims[1]))
            case "new":
                return Shape((*shape, NEW))
            case "rename":
                old, new = OLD_AND_NEW
                return Shape(tuple(evolve(d, name=new) if d.name == old else d for d in shape))
        return shape

    def dtype(self, *args: DType) -> DType:
        return DType.COMPUTE

    def reads(self, out: Value) -> tuple[Reads, ...]:
        return true_reads(self, [a.shape for a in out.args]) if self.claims is None else self.claims

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return out.args


@whole.register
def _(op: DrawnOp, out: Value, *args: Tensor) -> Tensor:
    x, names = args[0], list(out.args[0].shape.names)
    for s in op.stages:
        i = names.index(s.dim)
        x = KINDS[s.kind](x, i, s.number)
        if s.kind == "sum":
            names.remove(s.dim)
    if op.join in ("product", "outer"):
        have = out.args[1].shape.names
        y = args[1].permute([have.index(n) for n in out.shape.names if n in have])
        y = y[tuple(slice(None) if n in have else None for n in out.shape.names)]
        return x[(..., *(None for _ in out.shape.names[len(names) :]))] * y
    if op.join == "contract":
        i = names.index(out.args[1].shape.names[0])
        return torch.tensordot(x, args[1], ([i], [0]))
    if op.join == "take":
        i = names.index("seq")
        at = args[1].remainder(x.shape[i]).view(*args[1].shape, *(1 for _ in names[2:]))
        return x.gather(i, at.expand(*args[1].shape, *x.shape[2:]))
    return x[..., None] * torch.arange(1, 1 + NEW.known, dtype=x.dtype) if op.join == "new" else x


def true_reads(op: DrawnOp, shapes: Sequence[Shape]) -> tuple[Reads, ...]:
    """Return the least that the op reads of each argument, as `Reads` can say it."""
    kinds = [s.kind for s in op.stages]
    whole_dims = {s.dim for s in op.stages if s.kind in WHOLE}
    offset = {s.dim for s in op.stages if s.kind in OFFSET}
    summed = []
    sums = [(i, s.dim) for i, s in enumerate(op.stages) if s.kind == "sum"]
    sums += [(len(kinds), shapes[1].names[0])] if op.join == "contract" else []
    for i, dim in sums:
        if dim in whole_dims or NONLINEAR.intersection(kinds[i + 1 :]) or OF_ZERO.intersection(kinds[:i]):
            whole_dims.add(dim)
        else:
            summed.append(dim)
    whole_dims |= {"seq"} if op.join == "take" else set()
    renamed = OLD_AND_NEW if op.join == "rename" else None
    first = Reads(frozenset(whole_dims), offset=frozenset(offset - whole_dims), summed=tuple(summed), renamed=renamed)
    if op.join == "take":
        first = evolve(first, keys=whole_dims == {"seq"})
    if len(shapes) == 1:
        return (first,)
    key = shapes[1].names[0]
    if op.join != "contract":
        return first, Reads()
    return first, Reads(summed=(key,)) if key in summed else Reads(whole=frozenset({key}))


def lies(op: DrawnOp, out: Value) -> Iterator[tuple[Reads, ...]]:
    """Yield the true reads with one statement about the first argument left out or weakened."""
    first, *others = op.reads(out)
    for name in sorted(first.whole):
        less = evolve(first, whole=first.whole - {name})
        yield less, *others
        yield evolve(less, offset=less.offset | {name}), *others
        if name not in out.shape and op.join != "contract":  # linear in an argument with zeros outside of the shard
            yield evolve(less, summed=(*less.summed, name)), *others
    if first.whole.intersection(out.shape.names) and not first.keys and op.join != "take":
        yield evolve(first, keys=True), *others
    for name in sorted(first.offset):
        yield evolve(first, offset=first.offset - {name}), *others
    for name in first.summed:
        if not any(name in r.summed for r in others):
            yield evolve(first, summed=tuple(n for n in first.summed if n != name)), *others
    if first.summed and any(r.summed for r in others):
        yield evolve(first, summed=()), *(evolve(r, summed=()) for r in others)
    if first.renamed:
        yield evolve(first, renamed=None), *others


def drawn_stages(draw: Random, dims: Sequence[str]) -> tuple[Stage, ...]:
    """Return up to three stages, each along another dim, and elementwise ones between them."""
    out: list[Stage] = []
    for dim in draw.sample(list(dims), draw.randint(0, min(3, len(dims)))):
        kind = draw.choice([*WHOLE, *OFFSET, "sum"])
        out += [Stage("position", dim)] if kind == "sum" and draw.random() < 0.3 else []
        out.append(Stage(kind, dim, draw.choice({"groups": [2, 4], "window": [2, 3]}.get(kind, [1, 2, 3]))))
    if draw.random() < 0.4:
        left = [d for d in dims if Stage("sum", d) not in [evolve(s, number=1) for s in out]]
        at = draw.randint(0, len(out))
        out[at:at] = [Stage(draw.choice(list(PLAIN)), dim) for dim in left[:1]]
    return tuple(out)


def drawn_op(draw: Random, dims: Sequence[str]) -> DrawnOp:
    """Return an op of a first argument [.. dims] and, for most joins, a second one of `second_shape`."""
    stages = drawn_stages(draw, dims)
    left = [d for d in dims if all(s.kind != "sum" or s.dim != d for s in stages)]
    channels = [d for d in left if d not in ("seq", "slots")]
    fits = {
        "contract": bool(channels),
        "take": "seq" in left and left[0] == "seq",
        "rename": "ff" in left and all(s.dim != "ff" for s in stages),
    }
    return DrawnOp(stages, draw.choice([join for join in JOINS if fits.get(join, True)]))


def second_shape(op: DrawnOp, x: Shape) -> Shape | None:
    """Return the shape of the second argument, None if there is none: leading dims of the tokens, then channels."""
    left = DrawnOp(op.stages).shape(x)
    channels = [d for d in left if d.name not in ("batch", "seq", "slots")]
    tokens = [d for d in left if d.name in ("batch", "seq", "slots")]
    match op.join:
        case "product":
            return Shape((*tokens, *channels[:1]))
        case "outer":
            return Shape((*tokens, Dim("other", 6)))
        case "contract":
            return Shape((channels[-1], Dim("mixed", 6)))
        case "take":
            return Shape(tuple(tokens))
    return None
