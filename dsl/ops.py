"""The primitives: what a layer can be made of. Each knows its shape, its FLOPs and what its backward pass keeps."""

from __future__ import annotations

from fractions import Fraction

from attrs import frozen

from .dims import BATCH, SEQ, Dim, DType, Shape, Sizes
from .errors import ShapeError, caller
from .value import Op, Value, apply, renamed


@frozen
class Input(Op):
    """What the data provides."""

    name: str

    def __str__(self) -> str:
        return self.name


@frozen
class Weight(Op):
    """A parameter, drawn at the start from a normal distribution of this mean and standard deviation."""

    name: str
    mean: float = 0.0
    std: float = 0.02

    def __str__(self) -> str:
        return self.name


@frozen
class Dot(Op):
    """Contract two values over the dims that they share by name."""

    over: tuple[str, ...]

    def shape(self, *args: Shape) -> Shape:
        x, w = args
        for name in self.over:
            if x[name] != w[name]:
                raise ShapeError(f"cannot contract {x} with {w}: {x[name]} is not {w[name]}")
        left, right = x.without(*self.over), w.without(*self.over)
        for d in right:
            if d.name in left and left[d.name] != d:
                raise ShapeError(f"cannot contract {x} with {w}: {left[d.name]} is not {d}")
        return Shape((*left, *(d for d in right if d.name not in left)))

    def flops(self, out: Shape, args: tuple[Shape, ...], size: Sizes) -> int:
        return 2 * size(out) * size(args[0][name] for name in self.over)

    def keeps(self, out: Value) -> tuple[Value, ...]:
        x, w = out.args
        return x, w

    def __str__(self) -> str:
        return f"dot over {', '.join(self.over)}"


@frozen
class Drop(Op):
    """Each element is zeroed with this probability, else scaled by 1 / (1 - rate), while training."""

    rate: float

    def shape(self, *args: Shape) -> Shape:
        return args[0]

    def notes(self, out: Value) -> tuple[tuple[str, Shape, DType], ...]:
        return (("dropout mask", out.shape, DType.MASK),) if self.rate else ()


@frozen
class Normalize(Op):
    """Divide by the root mean square over a dim (centred first or not), then scale (and shift) by weights.

    Arguments: x, scale, and a shift if there is one.
    """

    over: str
    centred: bool
    eps: float

    def shape(self, *args: Shape) -> Shape:
        x, *weights = args
        for w in weights:
            if w.dims != (x[self.over],):
                raise ShapeError(f"cannot normalize {x} over {self.over!r} with a weight of {w}")
        return x

    def keeps(self, out: Value) -> tuple[Value, ...]:
        return (out.args[0],)


@frozen
class Lookup(Op):
    """The rows of a table that indices name. Arguments: indices, table."""

    key: str

    def shape(self, *args: Shape) -> Shape:
        indices, table = args
        table[self.key]
        return Shape((*indices, *table.without(self.key)))

    def keeps(self, out: Value) -> tuple[Value, ...]:
        return (out.args[0],)


@frozen
class Rows(Op):
    """The first rows of a table, one for each position of x along seq. Arguments: x, table."""

    key: str

    def shape(self, *args: Shape) -> Shape:
        x, table = args
        table[self.key]
        return Shape((x["seq"], *table.without(self.key)))


@frozen
class Rope(Op):
    """Rotate pairs of channels (the first half with the second) by angles of position / theta^(2i/head_dim).

    Source: Su et al., arXiv:2104.09864, in the half-split order of GPT-NeoX and Llama.
    """

    theta: float

    def shape(self, *args: Shape) -> Shape:
        (x,) = args
        if x["head_dim"].known % 2:
            raise ShapeError(f"cannot rotate {x}: rotary positions pair channels, so head_dim must be even")
        return x


@frozen
class Attend(Op):
    """Softmax attention of queries [.. heads head_dim] to keys and values [.. kv_heads head_dim].

    Query head i reads key/value head i * kv_heads / heads. Never stored: the scores (the kernel keeps
    only the logarithm of each softmax's sum; Dao et al., arXiv:2205.14135).
    """

    causal: bool
    dropout: float = 0.0

    def shape(self, *args: Shape) -> Shape:
        q, k, v = args
        q["seq"]
        n, g = q["heads"].known, k["kv_heads"].known
        if n % g:
            fits = ", ".join(str(i) for i in range(1, n + 1) if n % i == 0)
            raise ShapeError(f"{n} query heads cannot share {g} key/value heads evenly\nkv_heads can be {fits}")
        return Shape((*q.without("head_dim"), v["head_dim"]))

    def flops(self, out: Shape, args: tuple[Shape, ...], size: Sizes) -> int:
        q, k = args[:2]
        keys = size(k.without("batch", "kv_heads", "head_dim"))
        full = 2 * size(q) * keys + 2 * size(out) * keys
        return full // 2 if self.causal else full

    def keeps(self, out: Value) -> tuple[Value, ...]:
        return (*out.args, out)

    def notes(self, out: Value) -> tuple[tuple[str, Shape, DType], ...]:
        return (("log-sum-exp", out.shape.without("head_dim"), DType.FLOAT32),)


@frozen
class Gate(Op):
    """The weights of a token's experts: a softmax over its top_k scores, zero for the others."""

    top_k: int

    def shape(self, *args: Shape) -> Shape:
        (scores,) = args
        if not 1 <= self.top_k <= scores["experts"].known:
            raise ShapeError(
                f"cannot choose {self.top_k} of {scores['experts'].known} experts\n"
                f"top_k can be 1 to {scores['experts'].known}"
            )
        return scores

    def keeps(self, out: Value) -> tuple[Value, ...]:
        return (out,)


@frozen
class Route(Op):
    """Send each token to its top_k experts. Arguments: x [batch seq embed], gate [batch seq experts]."""

    top_k: int

    def shape(self, *args: Shape) -> Shape:
        x, gate = args
        experts = gate["experts"]
        slots = Dim("slots", None, Fraction(self.top_k, experts.known), x.without("embed").dims)
        return Shape((experts, slots, x["embed"]))


@frozen
class Combine(Op):
    """Bring each token's results back and add them, each times its gate. Arguments: y [experts slots embed], gate."""

    def shape(self, *args: Shape) -> Shape:
        y, gate = args
        return Shape((*gate.without("experts"), y["embed"]))

    def keeps(self, out: Value) -> tuple[Value, ...]:
        return out.args


@frozen
class Pick(Op):
    """One index of a dim: what each copy of a repeated layer sees."""

    dim: str

    def shape(self, *args: Shape) -> Shape:
        (x,) = args
        x[self.dim]
        return x.without(self.dim)


@frozen
class Rename(Op):
    """The same value with one dim under another name."""

    old: str
    new: str

    def shape(self, *args: Shape) -> Shape:
        (x,) = args
        x[self.old]
        return Shape(tuple(renamed(d, self.new) if d.name == self.old else d for d in x))


def ids(name: str = "tokens") -> Value:
    """An input of token ids, [batch seq]."""
    return Value(Input(name), (), Shape((BATCH, SEQ)), dtype=DType.INDEX, at=caller())


def weight(name: str, *dims: Dim, mean: float = 0.0, std: float = 0.02) -> Value:
    """A parameter. Used twice, it is shared; made inside a layer, it is that layer's own.

    Its initial values are normal(mean, std); a std of 0 makes it constant.
    """
    for d in dims:
        if isinstance(d, Dim) and d.size is None:
            raise ShapeError(f"weight {name!r} has sizes of its own, but {d.name} has none: write Dim({d.name!r}, ...)")
    return Value(Weight(name, mean, std), (), Shape(dims), at=caller())


def dot(x: Value, w: Value, *over: str) -> Value:
    """x and w contracted over the dims of these names."""
    return apply(Dot(over), x, w)
