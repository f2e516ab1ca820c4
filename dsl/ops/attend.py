"""Attention's core: what each position takes from the others."""

from __future__ import annotations

from attrs import frozen

from megaloom.dsl.dims import (
    Dim,
    DType,
    Shape,
    Sizes,
)
from megaloom.dsl.errors import ShapeError, divisors
from megaloom.dsl.value import Op, Value


@frozen
class Relative:
    """Which row of a table of biases a distance between key and query reads: `buckets` rows, one for each distance at
    first, then for ever more, up to `distance` and beyond. Source: T5, Raffel et al., arXiv:1910.10683.
    """

    buckets: int = 32
    distance: int = 128
    both_ways: bool = True  # half of the buckets for keys after the query

    def __attrs_post_init__(self) -> None:
        near = self.buckets // (4 if self.both_ways else 2)  # each of these distances has a bucket of its own
        if near < 1 or (self.both_ways and self.buckets % 2):
            fits = "an even number of at least 4" if self.both_ways else "a number of at least 2"
            raise ShapeError(f"distances cannot be told apart by {self.buckets} buckets: it takes {fits}")
        if self.distance <= near:
            raise ShapeError(f"{self.buckets} buckets reach {near} positions already: distance must be more than that")


@frozen(kw_only=True)
class Attend(Op):
    """Softmax attention of queries [.. heads head_dim] to keys and values [.. kv_heads head_dim].

    Query head i reads key/value head i * kv_heads / heads. Never stored: the scores (the kernel keeps
    only the logarithm of each softmax's sum; Dao et al., arXiv:2205.14135).

    causal: no position sees a later one. window: nor one that is `window` or more before it (Beltagy et al.,
    arXiv:2004.05150). scale: of the scores, head_dim^-0.5 if None. softcap: scores become softcap * tanh(scores /
    softcap) (Gemma 2, arXiv:2408.00118). alibi: scores fall with distance, at a slope for each head (Press et al.,
    arXiv:2108.12409). sink: a score for each head that nothing is taken from (Xiao et al., arXiv:2309.17453).
    relative: biases by distance. Arguments: q, k, v, then sinks [heads] and a table [buckets heads] if there are.
    """

    causal: bool = True
    dropout: float = 0.0
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    alibi: bool = False
    sink: bool = False
    relative: Relative | None = None

    def __attrs_post_init__(self) -> None:
        if self.window is not None and (self.window < 1 or not isinstance(self.window, int)):
            raise ShapeError(f"a window of {self.window}: it takes a whole number of at least 1, the position itself")
        if self.window is not None and not self.causal:
            raise ShapeError(f"a window of {self.window} reaches back only: say causal=True, or window=None")
        if self.softcap is not None and self.softcap <= 0:
            raise ShapeError(f"scores cannot be capped at {self.softcap}: softcap must be more than 0")

    def shape(self, *args: Shape) -> Shape:
        q, k, v, *others = args
        along(q), along(k)
        n, g = q["heads"].known, k["kv_heads"].known
        if n % g:
            raise ShapeError(f"{n} query heads cannot share {g} key/value heads evenly\nkv_heads can be {divisors(n)}")
        if q["head_dim"] != k["head_dim"]:
            raise ShapeError(f"queries {q} do not fit keys {k}: {q['head_dim']} is not {k['head_dim']}")
        if set(k.without("head_dim")) != set(v.without("head_dim")):
            raise ShapeError(f"keys {k} do not fit values {v}: they may differ in head_dim only")
        wanted: list[tuple[Dim, ...]] = [(q["heads"],)] * self.sink
        if self.relative is not None:
            wanted.append((Dim("buckets", self.relative.buckets), q["heads"]))
        if wanted != [o.dims for o in others]:
            want, have = (", ".join(map(str, shapes)) or "nothing" for shapes in (map(Shape, wanted), others))
            raise ShapeError(f"attention reads {want} beside queries, keys and values, and is given {have}")
        return Shape((*q.without("head_dim"), v["head_dim"]))

    def flops(self, out: Shape, args: tuple[Shape, ...], size: Sizes) -> int:
        """Of the scores and of the sums that they weight. Half of each when causal, less what a window leaves out."""
        q, k = args[:2]
        keys = size.of(along(k))
        a_key = 2 * (size(q) + size(out))
        if not self.causal:
            return a_key * keys
        seen = keys if self.window is None else min(keys, self.window)
        return a_key * (2 * keys * seen - seen * seen) // (2 * keys)

    def keeps(self, out: Value) -> tuple[Value, ...]:
        return (*out.args, out)

    def notes(self, out: Value) -> tuple[tuple[str, Shape, DType], ...]:
        return (("log-sum-exp", out.shape.without("head_dim"), DType.FLOAT32),)


def along(x: Shape) -> Dim:
    """The dim of positions of queries, keys or values."""
    return x.positions("heads", "kv_heads", "head_dim")
