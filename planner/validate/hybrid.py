"""Hybrid models of Mamba-2 and attention by their dimensions: Nemotron-H (arXiv:2504.03624) and Nemotron 3 Nano."""

from __future__ import annotations

import re
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

from .row_values import MAX_LAYERS, Row, row_integer, row_text
from .training_run import UnfitError

# Mamba-2's heads and state size, from the models' configurations at Hugging Face.
MAMBA = {
    "nemotron-h-8b": (128, 128),
    "nemotron-h-47b": (256, 256),
    "nemotron-h-56b": (256, 256),
    "nemotron3-nano": (64, 128),
}
# Order of the layers, for models whose rows do not count them; from the same configurations.
ORDER = {"nemotron3-nano": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"}
LETTERS = {"mamba2": "M", "attention": "*", "mlp": "-"}


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


def hybrid(row: Row) -> Hybrid:
    """Return the dimensions of a hybrid model from a row of the older schema."""
    name, arch = row_text(row, "model"), row_text(row, "arch")
    order = _order(name, arch)
    if name not in MAMBA or not order:
        raise UnfitError(f"the layers of {name} ({arch}) are not known")
    experts = row_integer(row, "experts", 0, MAX_LAYERS)
    return Hybrid(
        order=order,
        hidden=row_integer(row, "hidden"),
        heads=row_integer(row, "heads"),
        kv_heads=row_integer(row, "kv_heads"),
        head_dim=row_integer(row, "head_dim", 0) or None,
        ffn=row_integer(row, "expert_ffn" if experts else "ffn"),
        vocab=row_integer(row, "vocab"),
        mamba_heads=MAMBA[name][0],
        mamba_state=MAMBA[name][1],
        experts=experts,
        top_k=row_integer(row, "topk", 0),
        shared_ffn=row_integer(row, "shared_expert_ffn", 0),
    )


def _order(name: str, arch: str) -> str:
    """Return the letter of every layer in order; kinds that are only counted are spread evenly."""
    counts = [(int(n), LETTERS[kind]) for n, kind in re.findall(r"(\d{1,4}) (mamba2|mlp|attention)", arch)]
    spread = sorted(((i + 0.5) / n, letter) for n, letter in counts for i in range(n))
    return "".join(letter for _, letter in spread) or ORDER.get(name, "")
