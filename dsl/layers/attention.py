"""The layers that mix positions: attention in its kinds, and Mamba-2."""

from __future__ import annotations

from attrs import field, fields, frozen

from megaloom.dsl.dims import Dim
from megaloom.dsl.errors import ShapeError
from megaloom.dsl.layer import Layer, is_layer
from megaloom.dsl.ops.attend import Attend, Relative
from megaloom.dsl.ops.linear import Normalize, weight
from megaloom.dsl.ops.rope import Rope, base
from megaloom.dsl.ops.sequence import Conv, Scan
from megaloom.dsl.ops.shape import Concat
from megaloom.dsl.value import (
    Clamp,
    Value,
    apply,
    fn,
)

from .tokenwise import RMSNorm, probability, project


@frozen(kw_only=True)
class Attention(Layer):
    """Multi-head self-attention; with fewer kv_heads than heads, grouped (Ainslie et al., arXiv:2305.13245).

    head_dim: embed / heads if None. rope: the base of rotary positions, or all about them (none when None). bias: on
    all four projections; qkv_bias: on three. qk_norm: a layer over head_dim that queries and keys pass before they
    turn. table: biases by distance [buckets heads], shared by all layers that are given the same, and `relative` how
    distances are told apart. dropout: of the probabilities. The others are those of `Attend`.
    """

    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    causal: bool = True
    rope: float | Rope | None = field(default=None, converter=base)
    bias: bool = False
    qkv_bias: bool = False
    dropout: float = 0.0
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    alibi: bool = False
    sink: bool = False
    qk_norm: Layer | None = field(default=None, validator=is_layer)
    relative: Relative | None = None
    table: Value | None = None

    def __attrs_post_init__(self) -> None:
        probability("an attention dropout", self.dropout)
        if (self.relative is None) is not (self.table is None):
            raise ShapeError("`table` holds biases by distance, `relative` says which is whose: give both, or neither")

    @property
    def core(self) -> Attend:
        """How positions look at each other."""
        return Attend(
            causal=self.causal,
            dropout=self.dropout,
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
            alibi=self.alibi,
            sink=self.sink,
            relative=self.relative,
        )

    def body(self, x: Value, /, **side: Value) -> Value:
        return self.over(x, x)

    def over(self, x: Value, memory: Value) -> Value:
        """What the positions of x take from those of the memory."""
        e, h = x["embed"], Dim("heads", self.heads)
        g = Dim("kv_heads", self.heads if self.kv_heads is None else self.kv_heads)
        c = Dim("head_dim", share(e, h) if self.head_dim is None else self.head_dim)
        biased = self.bias or self.qkv_bias
        q, k = project("q", x, h, c, bias=biased), project("k", memory, g, c, bias=biased)
        v = project("v", memory, g, c, bias=biased)
        if self.qk_norm:
            q, k = q >> self.qk_norm.named("q_norm"), k >> self.qk_norm.named("k_norm")
        if self.rope is not None:
            rope = self.rope if isinstance(self.rope, Rope) else Rope(self.rope)
            q, k = apply(rope, q), apply(rope, k)
        sinks = [weight("sinks", h)] if self.sink else []
        o = apply(self.core, q, k, v, *sinks, *([] if self.table is None else [self.table]))
        return project("o", o, e, over=("heads", "head_dim"), bias=self.bias)


@frozen(kw_only=True)
class CrossAttention(Layer):
    """Attention to the positions of another value, the side input `memory` [batch source embed]; never causal.

    The fields are those of `Attention`.
    """

    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    bias: bool = False
    qkv_bias: bool = False
    dropout: float = 0.0
    scale: float | None = None

    def body(self, x: Value, /, memory: Value, **side: Value) -> Value:
        own = {f.name: getattr(self, f.name) for f in fields(type(self)) if f.name != "at"}
        return Attention(causal=False, **own).over(x, memory)


@frozen(kw_only=True)
class MLA(Layer):
    """Multi-head latent attention: keys and values of all heads are made from one short vector for each position.

    q_rank: of the queries' own short vector (none: straight from x). kv_rank: of the keys' and values'. nope, rope:
    channels of each head without and with positions, v: of its values; the turning keys are the same for all heads.
    positions: how they turn. scale: of the scores, (nope + rope)^-0.5 if None. eps: of the norms.
    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    v: int
    positions: Rope = field()
    scale: float | None = None
    eps: float = 1e-6

    @positions.validator
    def _turning(self, _: object, positions: object) -> None:
        if not isinstance(positions, Rope):
            raise ShapeError(f"positions of {positions!r}: it takes a Rope, such as Rope(10_000)")

    def body(self, x: Value, /, **side: Value) -> Value:
        e, h, g = x["embed"], Dim("heads", self.heads), Dim("kv_heads", self.heads)
        nope, rope, v = (Dim("head_dim", n) for n in (self.nope, self.rope, self.v))
        q = x
        if self.q_rank is not None:
            q = project("q_down", x, Dim("q_rank", self.q_rank)) >> RMSNorm(self.eps, over="q_rank").named("q_norm")
        kv = project("kv_down", x, Dim("kv_rank", self.kv_rank)) >> RMSNorm(self.eps, over="kv_rank").named("kv_norm")
        inner = "embed" if self.q_rank is None else "q_rank"
        q_nope, q_rope = project("q_nope", q, h, nope, over=(inner,)), project("q_rope", q, h, rope, over=(inner,))
        k_nope, values = (project(n, kv, g, c, over=("kv_rank",)) for n, c in (("k_nope", nope), ("v", v)))
        k_rope = project("k_rope", x, rope)
        q = apply(Concat("head_dim"), q_nope, apply(self.positions, q_rope))
        k = apply(Concat("head_dim"), k_nope, apply(self.positions, k_rope))
        o = apply(Attend(scale=self.scale), q, k, values)
        return project("o", o, e, over=("heads", "head_dim"))


@frozen(kw_only=True)
class Mamba2(Layer):
    """A selective state space of `state` numbers for each of heads * head_dim channels (Dao & Gu, arXiv:2405.21060).

    groups: heads share as many inputs b and outputs c of the state. conv: positions that the convolution before the
    scan reaches back, itself included; conv_bias: whether it shifts. norm_groups: parts in which the gated output is
    normalized. dt: the least and the most that a step may be. bias: on the projections.
    """

    heads: int
    head_dim: int
    state: int
    groups: int = 1
    conv: int = 4
    conv_bias: bool = True
    bias: bool = False
    norm_groups: int = 1
    eps: float = 1e-5
    dt: tuple[float, float] | None = None

    def body(self, x: Value, /, **side: Value) -> Value:
        e, h, c = x["embed"], Dim("heads", self.heads), Dim("head_dim", self.head_dim)
        g, n = Dim("groups", self.groups), Dim("state", self.state)
        z = project("z", x, h, c, bias=self.bias)
        u, b, out = (self._convolved(name, x, *dims) for name, dims in (("x", (h, c)), ("b", (g, n)), ("c", (g, n))))
        dt = fn("softplus", project("dt", x, h, bias=self.bias) + weight("dt_shift", h))
        dt = apply(Clamp(*self.dt), dt) if self.dt else dt
        a = -1.0 * fn("exp", weight("a_log", h))
        y = apply(Scan(), u, dt, a, b, out) + u * weight("skip", h, mean=1.0, std=0.0)
        y = y * fn("silu", z)
        norm = Normalize(("heads", "head_dim"), False, self.eps, self.norm_groups)
        y = apply(norm, y, weight("scale", h, c, mean=1.0, std=0.0))
        return project("o", y, e, over=("heads", "head_dim"), bias=self.bias)

    def _convolved(self, name: str, x: Value, *dims: Dim) -> Value:
        kernel = weight(f"{name}_conv", *dims, Dim("width", self.conv))
        y = apply(Conv(), project(name, x, *dims, bias=self.bias), kernel)
        return fn("silu", y + weight(f"{name}_conv_bias", *dims, std=0.0) if self.conv_bias else y)


def share(embed: Dim, heads: Dim) -> int:
    """The channels of each head when the heads share embed evenly."""
    if embed.known % heads.known:
        raise ShapeError(f"{embed} does not divide into {heads}: give head_dim, or heads that divide {embed.known}")
    return embed.known // heads.known
