"""Decoder-only models by their dimensions alone, as tables of runs and papers give them."""

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
    gated: bool = True  # a SwiGLU rather than an MLP
    learned: bool = False  # GPT: learned positions, LayerNorm, biases, one table for embedding and logits
    positions: int = 2048  # that are learned
    tied: bool = False
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0  # before those with experts
    alternate: bool = False  # every second layer has experts
    window: int | None = None  # of every second layer
    normed: bool = False  # queries and keys are, head by head
    clamped: bool = False  # experts have biases and clamps, as those of GPT-OSS
    latent: tuple[tuple[str, int], ...] = ()  # ranks and channels of latent attention
    ahead: int = 0  # layers that predict tokens further ahead

    def nearest(self, billions: float | None) -> Decoder:
        """Of those with a gated or a plain MLP, with one table or two, the one of about so many parameters."""
        if billions is None:
            return self
        return _nearest(self, billions)

    def model(self, dropout: float = 0.0) -> Model:
        """The model, made once."""
        return _model(self, dropout)

    def _made(self, dropout: float) -> Model:
        v, d = Dim("vocab", self.vocab), Dim("embed", self.hidden)
        wte = weight("wte", v, d)
        tokens = ids()
        x = tokens >> Embed(wte)
        if self.learned:
            x = x >> Positions(weight("wpe", Dim("position", self.positions), d))
        x = x >> Dropout(dropout) if dropout else x
        for times, block in self._blocks(dropout):
            x = x >> repeat(times, block)
        norm, head = self._norm, wte if self.tied or self.learned else weight("head", v, d)
        outputs = [x >> norm >> Unembed(head)]
        for i in range(self.ahead):
            tokens = apply(Shift("seq", 1), tokens) if i else tokens
            x = x >> repeat(1, Join(wte, norm).given(tokens=tokens), self._blocks(dropout)[-1][1])
            outputs.append(x >> norm >> Unembed(head))
        return model(f"{self.layers} layers of {self.hidden}", *outputs)

    @property
    def _norm(self) -> Layer:
        return LayerNorm() if self.learned else RMSNorm()

    def _blocks(self, dropout: float) -> list[tuple[int, Layer]]:
        """The runs of equal blocks, each with its length."""
        dense = SwiGLU(self.ffn) if self.gated else MLP(self.ffn, "gelu", bias=self.learned)
        if not self.experts:
            return self._runs(self.layers, dense, dense, dropout)
        shared = self._plain(self.shared_ffn) if self.shared_ffn else None
        width = self.expert_ffn or self.ffn
        expert = ClampedGLU(width) if self.clamped else self._plain(width)
        moe = MoE(expert, self.experts, self.top_k, balance=0.01, shared=shared, bias=self.clamped)
        first = [(self.dense_layers, self._block(dense, None, dropout))] if self.dense_layers else []
        return [*first, *self._runs(self.layers - self.dense_layers, dense if self.alternate else moe, moe, dropout)]

    def _plain(self, width: int) -> Layer:
        return SwiGLU(width) if self.gated else MLP(width, "gelu")

    def _runs(self, layers: int, one: Layer, other: Layer, dropout: float) -> list[tuple[int, Layer]]:
        if one is other and self.window is None:
            return [(layers, self._block(one, None, dropout))]
        pair = self._block(one, self.window, dropout), self._block(other, None, dropout)
        return [(1, pair[i % 2]) for i in range(layers)]

    def _block(self, ff: Layer, window: int | None, dropout: float) -> Layer:
        drop = (Dropout(dropout),) if dropout else ()
        return chain(residual(self._norm, self._attention(window, dropout), *drop), residual(self._norm, ff, *drop))

    def _attention(self, window: int | None, dropout: float) -> Layer:
        if self.latent:
            n = dict(self.latent)
            return MLA(
                heads=self.heads,
                q_rank=n["q_lora"] or None,
                kv_rank=n["kv_lora"],
                nope=n["qk_nope"],
                rope=n["qk_rope"],
                v=n["v"],
                positions=Rope(10_000),
            )
        return Attention(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            rope=None if self.learned else 10_000,
            bias=self.learned,
            window=window,
            dropout=dropout,
            qk_norm=RMSNorm(over="head_dim") if self.normed else None,
        )


@lru_cache(maxsize=512)
def _nearest(d: Decoder, billions: float) -> Decoder:
    forms = [evolve(d, gated=g, tied=t) for g, t in product((True, False), (False, True))]
    return min(forms, key=lambda form: abs(params(form.model()) - billions * 1e9))


@lru_cache(maxsize=512)
def _model(d: Decoder, dropout: float) -> Model:
    return d._made(dropout)
