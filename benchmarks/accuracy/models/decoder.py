"""Decoder-only models by their dimensions, as papers and tables of runs give them."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

from attrs import evolve, frozen

from megaloom.dsl import (
    MLA,
    MLP,
    Attention,
    ClampedGLU,
    Dim,
    Dropout,
    Embed,
    Join,
    Layer,
    LayerNorm,
    Model,
    MoE,
    Positions,
    RMSNorm,
    Rope,
    Shift,
    SwiGLU,
    Unembed,
    apply,
    chain,
    ids,
    model,
    params,
    repeat,
    residual,
    weight,
)


@frozen(kw_only=True)
class LatentDims:
    """The ranks and channels of multi-head latent attention."""

    q_rank: int = 0  # 0: queries are not compressed
    kv_rank: int
    qk_nope: int
    qk_rope: int
    v: int


@frozen(kw_only=True, cache_hash=True)
class Decoder:
    """The dimensions of a decoder-only model."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    kv_heads: int | None = None
    head_dim: int | None = None
    gated: bool = True  # SwiGLU, not an MLP
    gpt: bool = False  # learned positions, LayerNorm, biases, one table for embedding and logits
    max_positions: int = 2048  # learned positions
    tied_embeddings: bool = False
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    groups: int = 1  # of experts, of which a router chooses `top_groups` for each token
    top_groups: int = 1
    dense_layers: int = 0  # layers before the first one with experts
    alternate_experts: bool = False  # every second layer has experts
    sliding_window: int | None = None  # of every second layer
    qk_norm: bool = False  # queries and keys are normalized per head
    clamped_experts: bool = False  # experts have biases and clamps, as GPT-OSS
    latent_attention: LatentDims | None = None
    mtp_layers: int = 0  # multi-token prediction

    def nearest(self, billions: float | None) -> Decoder:
        """Return the variant with the nearest number of parameters: gated MLP or not, embeddings tied or not."""
        if billions is None:
            return self
        return _nearest(self, billions)

    def model(self, dropout: float = 0.0) -> Model:
        """Return the model; equal dimensions give the same object."""
        return _model(self, dropout)

    def _build(self, dropout: float) -> Model:
        v, d = Dim("vocab", self.vocab), Dim("embed", self.hidden)
        wte = weight("wte", v, d)
        tokens = ids()
        x = tokens >> Embed(wte)
        if self.gpt:
            x = x >> Positions(weight("wpe", Dim("position", self.max_positions), d))
        x = x >> Dropout(dropout) if dropout else x
        for times, block in self._blocks(dropout):
            x = x >> repeat(times, block)
        norm, head = self._norm, wte if self.tied_embeddings or self.gpt else weight("head", v, d)
        outputs = [x >> norm >> Unembed(head)]
        for i in range(self.mtp_layers):
            tokens = apply(Shift("seq", 1), tokens) if i else tokens
            x = x >> repeat(1, Join(wte, norm).given(tokens=tokens), self._blocks(dropout)[-1][1])
            outputs.append(x >> norm >> Unembed(head))
        return model(f"{self.layers} layers of {self.hidden}", *outputs)

    @property
    def _norm(self) -> Layer:
        return LayerNorm() if self.gpt else RMSNorm()

    def _blocks(self, dropout: float) -> list[tuple[int, Layer]]:
        """Return groups of equal consecutive blocks as (number of blocks, block)."""
        dense = SwiGLU(self.ffn) if self.gated else MLP(self.ffn, "gelu", bias=self.gpt)
        if not self.experts:
            return self._block_groups(self.layers, dense, dense, dropout)
        shared = self._plain(self.shared_ffn) if self.shared_ffn else None
        width = self.expert_ffn or self.ffn
        expert = ClampedGLU(width) if self.clamped_experts else self._plain(width)
        moe = MoE(
            expert,
            self.experts,
            self.top_k,
            balance=0.01,
            shared=shared,
            bias=self.clamped_experts,
            groups=self.groups,
            top_groups=self.top_groups,
        )
        first = [(self.dense_layers, self._block(dense, None, dropout))] if self.dense_layers else []
        return [
            *first,
            *self._block_groups(
                self.layers - self.dense_layers, dense if self.alternate_experts else moe, moe, dropout
            ),
        ]

    def _plain(self, width: int) -> Layer:
        return SwiGLU(width) if self.gated else MLP(width, "gelu")

    def _block_groups(self, layers: int, one: Layer, other: Layer, dropout: float) -> list[tuple[int, Layer]]:
        if one is other and self.sliding_window is None:
            return [(layers, self._block(one, None, dropout))]
        pair = self._block(one, self.sliding_window, dropout), self._block(other, None, dropout)
        return [(1, pair[i % 2]) for i in range(layers)]

    def _block(self, ff: Layer, window: int | None, dropout: float) -> Layer:
        drop = (Dropout(dropout),) if dropout else ()
        return chain(residual(self._norm, self._attention(window, dropout), *drop), residual(self._norm, ff, *drop))

    def _attention(self, window: int | None, dropout: float) -> Layer:
        if self.latent_attention:
            latent = self.latent_attention
            return MLA(
                heads=self.heads,
                q_rank=latent.q_rank or None,
                kv_rank=latent.kv_rank,
                nope=latent.qk_nope,
                rope=latent.qk_rope,
                v=latent.v,
                positions=Rope(10_000),
            )
        return Attention(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            rope=None if self.gpt else 10_000,
            bias=self.gpt,
            window=window,
            dropout=dropout,
            qk_norm=RMSNorm(over="head_dim") if self.qk_norm else None,
        )


@lru_cache(maxsize=512)
def _nearest(d: Decoder, billions: float) -> Decoder:
    forms = [evolve(d, gated=g, tied_embeddings=t) for g, t in product((True, False), (False, True))]
    return min(forms, key=lambda form: abs(params(form.model()) - billions * 1e9))


@lru_cache(maxsize=512)
def _model(d: Decoder, dropout: float) -> Model:
    return d._build(dropout)
