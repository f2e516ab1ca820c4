"""Multi-head latent attention (MLA)."""

from __future__ import annotations

from attrs import field, frozen

from megaloom.dsl.dims import Dim
from megaloom.dsl.errors import ShapeError
from megaloom.dsl.layer import Layer
from megaloom.dsl.ops.attention_core import Attend
from megaloom.dsl.ops.rope import Rope
from megaloom.dsl.ops.shape import Concat
from megaloom.dsl.value import Value, apply

from .linear import project
from .norms import RMSNorm


@frozen(kw_only=True)
class MLA(Layer):
    """Multi-head latent attention: keys and values are projected from one low-rank vector per position.

    q_rank: the rank of the queries' low-rank vector; None projects queries straight from x. kv_rank: the rank of the
    vector for keys and values. nope, rope: channels of each head without and with rotary positions; the rotated keys
    are shared by all heads. v: channels of each value head. positions: the rotation. scale: of the scores; None is
    (nope + rope)^-0.5. eps: of the norms on the low-rank vectors. Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
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
    def _is_rope(self, _: object, positions: object) -> None:
        if not isinstance(positions, Rope):
            raise ShapeError(f"positions must be a Rope, such as Rope(10_000), got {positions!r}")

    def body(self, x: Value, /, documents: Value | None = None, **side: Value) -> Value:
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
        indices = [] if documents is None else [documents, documents]
        o = apply(Attend(scale=self.scale, documents=bool(indices)), q, k, values, *indices)
        return project("o", o, e, over=("heads", "head_dim"))
