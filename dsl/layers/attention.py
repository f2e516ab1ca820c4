"""Multi-head attention and cross-attention."""

from __future__ import annotations

from attrs import evolve, field, fields, frozen

from megaloom.dsl.dims import Dim
from megaloom.dsl.errors import ShapeError
from megaloom.dsl.layer import Layer, is_layer
from megaloom.dsl.ops.attention_core import Attend, RelativeBuckets
from megaloom.dsl.ops.rope import Rope, int_if_whole
from megaloom.dsl.ops.weight import weight
from megaloom.dsl.value import Value, apply, fn

from .linear import check_probability, project


@frozen(kw_only=True)
class Attention(Layer):
    """Multi-head self-attention; grouped-query attention if kv_heads < heads (Ainslie et al., arXiv:2305.13245).

    head_dim: None is embed / heads. rope: the base of rotary positions, or a `Rope`; None is no rotation. bias: of all
    four projections. qkv_bias: of queries, keys and values only. qk_norm: a norm over head_dim, applied to queries and
    keys before the rotation. table: T5's learned biases by distance, [buckets heads]; layers that get one table share
    it. relative: the buckets of `table`. dropout: of the probabilities. gated: each head's output is multiplied by the
    sigmoid of a projection of x (Qiu et al., arXiv:2505.06708). The other fields are those of `Attend`.

    With the side input `documents`, a token reads tokens of its own document only.
    """

    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    causal: bool = True
    rope: float | Rope | None = field(default=None, converter=int_if_whole)
    bias: bool = False
    qkv_bias: bool = False
    dropout: float = 0.0
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    alibi: bool = False
    sink: bool = False
    qk_norm: Layer | None = field(default=None, validator=is_layer)
    relative: RelativeBuckets | None = None
    table: Value | None = None
    gated: bool = False

    def __attrs_post_init__(self) -> None:
        check_probability("attention dropout", self.dropout)
        if (self.relative is None) is not (self.table is None):
            raise ShapeError(
                "`table` (biases by distance) and `relative` (their buckets) go together: give both, or neither"
            )

    @property
    def core(self) -> Attend:
        """The op between the projections."""
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

    def body(self, x: Value, /, documents: Value | None = None, **side: Value) -> Value:
        return self.attend(x, x, () if documents is None else (documents, documents))

    def attend(self, x: Value, memory: Value, documents: tuple[Value, ...] = ()) -> Value:
        """Return the attention of the positions of x to the positions of memory.

        documents: the document indices of both, or none.
        """
        e, h = x["embed"], Dim("heads", self.heads)
        g = Dim("kv_heads", self.heads if self.kv_heads is None else self.kv_heads)
        c = Dim("head_dim", _head_dim(e, h) if self.head_dim is None else self.head_dim)
        biased = self.bias or self.qkv_bias
        q, k = project("q", x, h, c, bias=biased), project("k", memory, g, c, bias=biased)
        v = project("v", memory, g, c, bias=biased)
        if self.qk_norm:
            q, k = q >> self.qk_norm.named("q_norm"), k >> self.qk_norm.named("k_norm")
        if self.rope is not None:
            rope = self.rope if isinstance(self.rope, Rope) else Rope(self.rope)
            q, k = apply(rope, q), apply(rope, k)
        sinks = [weight("sinks", h)] if self.sink else []
        others = [*sinks, *([] if self.table is None else [self.table]), *documents]
        o = apply(evolve(self.core, documents=bool(documents)), q, k, v, *others)
        if self.gated:
            o = o * fn("sigmoid", project("gate", x, h, c, bias=biased))
        return project("o", o, e, over=("heads", "head_dim"), bias=self.bias)


@frozen(kw_only=True)
class CrossAttention(Layer):
    """Attention to the positions of the side input `memory` [batch source embed]; never causal.

    The fields are those of `Attention`. With the side inputs `documents` and `memory_documents`, a token reads the
    positions of memory with the document index of its own.
    """

    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    bias: bool = False
    qkv_bias: bool = False
    dropout: float = 0.0
    scale: float | None = None

    def body(
        self,
        x: Value,
        /,
        memory: Value,
        documents: Value | None = None,
        memory_documents: Value | None = None,
        **side: Value,
    ) -> Value:
        own = {f.name: getattr(self, f.name) for f in fields(type(self)) if f.name != "at"}
        if (documents is None) is not (memory_documents is None):
            raise ShapeError("give both `documents` and `memory_documents` to cross-attention, or neither")
        both = () if documents is None or memory_documents is None else (documents, memory_documents)
        return Attention(causal=False, **own).attend(x, memory, both)


def _head_dim(embed: Dim, heads: Dim) -> int:
    if embed.known % heads.known:
        raise ShapeError(f"{embed} does not divide into {heads}: give head_dim, or use heads that divide {embed.known}")
    return embed.known // heads.known
