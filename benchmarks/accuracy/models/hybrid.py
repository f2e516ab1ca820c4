"""Hybrid models of Mamba-2 and attention by their dimensions: Nemotron-H (arXiv:2504.03624) and Nemotron 3 Nano."""

from __future__ import annotations

from functools import lru_cache

from attrs import frozen

from megaloom.dsl import (
    MLP,
    Attention,
    Dim,
    Embed,
    Layer,
    Mamba2,
    Model,
    MoE,
    RMSNorm,
    Unembed,
    chain,
    ids,
    model,
    repeat,
    residual,
    weight,
)


@frozen(kw_only=True, cache_hash=True)
class Hybrid:
    """The dimensions of a hybrid model. `order` has a letter per layer: M Mamba-2, * attention, - MLP, E experts."""

    order: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int | None
    ffn: int
    vocab: int
    mamba_heads: int  # of 64 channels, in 8 groups
    mamba_state: int
    experts: int = 0
    top_k: int = 0
    shared_ffn: int = 0

    def model(self, dropout: float = 0.0) -> Model:
        """Return the model, which has no dropout; equal dimensions give the same object."""
        return _model(self)

    @property
    def layers(self) -> dict[str, Layer]:
        """Return the layer of each letter of `order`."""
        mlp = MLP(self.ffn, "relu2")
        layers: dict[str, Layer] = {
            "M": Mamba2(heads=self.mamba_heads, head_dim=64, state=self.mamba_state, groups=8, norm_groups=8),
            "*": Attention(heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim),
            "-": mlp,
        }
        if self.experts:
            shared = MLP(self.shared_ffn, "relu2") if self.shared_ffn else None
            layers["E"] = MoE(mlp, self.experts, self.top_k, score="sigmoid", shared=shared)
        return layers


@lru_cache(maxsize=64)
def _model(of: Hybrid) -> Model:
    v, d, layers = Dim("vocab", of.vocab), Dim("embed", of.hidden), of.layers
    x = ids() >> Embed(weight("wte", v, d))
    x = x >> chain(*(repeat(1, residual(RMSNorm(), layers[letter])) for letter in of.order))
    return model(f"{len(of.order)} layers of {of.hidden}", x >> RMSNorm() >> Unembed(weight("head", v, d)))
