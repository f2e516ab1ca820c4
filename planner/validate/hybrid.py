"""Models whose layers are mostly Mamba-2's, by their dimensions: Nemotron-H (arXiv:2504.03624) and Nemotron 3 Nano."""

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

from .run import (
    LARGEST,
    Row,
    UnfitError,
    text,
    whole,
)

# What rows do not say, from the models' configurations at Hugging Face: heads and states of Mamba-2, in groups of 8 and
# of 64 channels a head; and the order of layers where not even their numbers are said.
STATES = {
    "nemotron-h-8b": (128, 128),
    "nemotron-h-47b": (256, 256),
    "nemotron-h-56b": (256, 256),
    "nemotron3-nano": (64, 128),
}
ORDER = {"nemotron3-nano": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"}
LETTERS = {"mamba2": "M", "attention": "*", "mlp": "-"}


@frozen(kw_only=True, cache_hash=True)
class Hybrid:
    """The dimensions of such a model. order: a letter a layer: M Mamba-2, * attention, - feed-forward, E experts."""

    order: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int | None
    ffn: int
    vocab: int
    states: tuple[int, int]  # heads of Mamba-2, and the size of their state
    experts: int = 0
    top_k: int = 0
    shared_ffn: int = 0

    def model(self, dropout: float = 0.0) -> Model:
        """The model, made once. It has no dropout."""
        return _model(self)

    @property
    def layers(self) -> dict[str, Layer]:
        """The layer of each letter."""
        mlp, (heads, state) = MLP(self.ffn, "relu2"), self.states
        found: dict[str, Layer] = {
            "M": Mamba2(heads=heads, head_dim=64, state=state, groups=8, norm_groups=8),
            "*": Attention(heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim),
            "-": mlp,
        }
        if self.experts:
            shared = MLP(self.shared_ffn, "relu2") if self.shared_ffn else None
            found["E"] = MoE(mlp, self.experts, self.top_k, score="sigmoid", shared=shared)
        return found


@lru_cache(maxsize=64)
def _model(of: Hybrid) -> Model:
    v, d, layers = Dim("vocab", of.vocab), Dim("embed", of.hidden), of.layers
    x = ids() >> Embed(weight("wte", v, d))
    x = x >> chain(*(repeat(1, residual(RMSNorm(), layers[letter])) for letter in of.order))
    return model(f"{len(of.order)} layers of {of.hidden}", x >> RMSNorm() >> Unembed(weight("head", v, d)))


def hybrid(row: Row) -> Hybrid:
    """What a row says of such a model."""
    name, arch = text(row, "model"), text(row, "arch")
    order = _order(name, arch)
    if name not in STATES or not order:
        raise UnfitError(f"{arch} is not described well enough")
    experts = whole(row, "experts", 0, LARGEST)
    return Hybrid(
        order=order,
        hidden=whole(row, "hidden"),
        heads=whole(row, "heads"),
        kv_heads=whole(row, "kv_heads"),
        head_dim=whole(row, "head_dim", 0) or None,
        ffn=whole(row, "expert_ffn" if experts else "ffn"),
        vocab=whole(row, "vocab"),
        states=STATES[name],
        experts=experts,
        top_k=whole(row, "topk", 0),
        shared_ffn=whole(row, "shared_expert_ffn", 0),
    )


def _order(name: str, arch: str) -> str:
    """The layers in their order; where only their numbers are said, each kind spread evenly."""
    said = [(int(n), LETTERS[kind]) for n, kind in re.findall(r"(\d{1,4}) (mamba2|mlp|attention)", arch)]
    places = sorted(((i + 0.5) / n, letter) for n, letter in said for i in range(n))
    return "".join(letter for _, letter in places) or ORDER.get(name, "")
