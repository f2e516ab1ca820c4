"""Sizes of published models as Megatron-LM's flags, for files that only name their model.

Sources: config.json of each model on huggingface.co.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from attrs import frozen

from megaloom.planner.runs.words import Word


@frozen(kw_only=True)
class PublishedModel:
    """Sizes of a dense decoder with RMSNorm, SwiGLU and rotary positions."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    rotary_base: int
    head_dim: int | None = None
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False

    def words(self, name: Word) -> Iterator[Word]:
        """Yield the flags of the model, on the line that names it."""
        values: dict[str, int | str | None] = {
            "num-layers": self.layers,
            "hidden-size": self.hidden,
            "ffn-hidden-size": self.ffn,
            "num-attention-heads": self.heads,
            "num-query-groups": self.kv_heads,
            "kv-channels": self.head_dim,
            "vocab-size": self.vocab,
            "rotary-base": self.rotary_base,
            "position-embedding-type": "rope",
            "normalization": "RMSNorm",
            "max-position-embeddings": 2**17,
        }
        switches = {
            "group-query-attention": True,
            "swiglu": True,
            "disable-bias-linear": True,
            "untie-embeddings-and-output-weights": not self.tied,
            "add-qkv-bias": self.qkv_bias,
            "qk-layernorm": self.qk_norm,
        }
        for flag, value in values.items():
            if value is not None:
                yield Word(f"--{flag}", name.origin)
                yield Word(str(value), name.origin)
        yield from (Word(f"--{flag}", name.origin) for flag, is_set in switches.items() if is_set)


def _sized(rows: str, **common: int | bool | None) -> dict[str, PublishedModel]:
    """Return models by their size: rows of size, layers, hidden, ffn, heads, key and value heads."""
    models = {}
    for row in rows.split(";"):
        size, *numbers = row.split()
        layers, hidden, ffn, heads, kv_heads = map(int, numbers)
        models[size] = PublishedModel(
            layers=layers,
            hidden=hidden,
            ffn=ffn,
            heads=heads,
            kv_heads=kv_heads,
            **common,  # type: ignore[arg-type]
        )
    return models


LLAMA3 = _sized(
    "8b 32 4096 14336 32 8; 70b 80 8192 28672 64 8; 405b 126 16384 53248 128 8", vocab=128_256, rotary_base=500_000
)
_LLAMA32 = _sized("1b 16 2048 8192 32 8; 3b 28 3072 8192 24 8", vocab=128_256, rotary_base=500_000, tied=True)
_LLAMA2 = _sized(
    "7b 32 4096 11008 32 32; 13b 40 5120 13824 40 40; 70b 80 8192 28672 64 8", vocab=32_000, rotary_base=10_000
)
_QWEN25 = {
    **_sized(
        "0.5b 24 896 4864 14 2; 1.5b 28 1536 8960 12 2; 3b 36 2048 11008 16 2",
        vocab=151_936, rotary_base=10**6, tied=True, qkv_bias=True,
    ),
    **_sized(
        "7b 28 3584 18944 28 4; 14b 48 5120 13824 40 8; 32b 64 5120 27648 40 8; 72b 80 8192 29568 64 8",
        vocab=152_064, rotary_base=10**6, qkv_bias=True,
    ),
}  # fmt: skip
QWEN3 = {
    **_sized(
        "0.6b 28 1024 3072 16 8; 1.7b 28 2048 6144 16 8; 4b 36 2560 9728 32 8",
        vocab=151_936, rotary_base=10**6, head_dim=128, tied=True, qk_norm=True,
    ),
    **_sized(
        "8b 36 4096 12288 32 8; 14b 40 5120 17408 40 8; 32b 64 5120 25600 64 8",
        vocab=151_936, rotary_base=10**6, head_dim=128, qk_norm=True,
    ),
}  # fmt: skip
_ENDINGS = ("-instruct", "-base", "-hf", "-chat")


def _named() -> Mapping[str, PublishedModel]:
    families = (
        (("llama-3-", "llama-3.1-", "llama-3.3-", "meta-llama-3-", "meta-llama-3.1-"), LLAMA3),
        (("llama-3.2-",), _LLAMA32),
        (("llama-2-",), _LLAMA2),
        (("qwen2.5-",), _QWEN25),
        (("qwen3-",), QWEN3),
    )
    return {
        family + size: model for names, models in families for family, (size, model) in product(names, models.items())
    }


_BY_NAME = _named()


def published_model(name: str) -> PublishedModel | None:
    """Return the sizes of a model by its name on huggingface.co, or None if they are not known here."""
    plain = name.rpartition("/")[2].lower()
    for ending in _ENDINGS:
        plain = plain.removesuffix(ending)
    return _BY_NAME.get(plain)
