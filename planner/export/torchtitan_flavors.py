"""The decoders that torchtitan trains, each with the name of its model and of its flavor.

Sources: torchtitan 0.2.2, models/{llama3,qwen3,deepseek_v3}/__init__.py, and the defaults of their model/args.py;
torchtitan 0.3.0, the same folders, which have more flavors. Those that stand in both have equal sizes.
"""

from __future__ import annotations

from attrs import evolve, frozen

from megaloom.dsl import (
    MLA,
    Attention,
    Llama3Scaling,
    MoE,
    RMSNorm,
    Rope,
    SwiGLU,
)

from .decoder import AttentionLayer, DecoderModel, FeedForward
from .target import Target

_ANY_ROPE = Rope(10_000)  # stands for every kind of rotary positions


@frozen
class Flavor:
    """A decoder with its names in torchtitan, and its properties that may differ from the plan's model at no cost."""

    model: str
    name: str
    decoder: DecoderModel
    own: str
    rope: Rope  # its own rotary positions
    only_newest: bool = False  # not in 0.2.2

    @property
    def own_decoder(self) -> DecoderModel:
        """The decoder with torchtitan's own positions and eps."""
        m, a = self.decoder, self.decoder.attention
        attention = evolve(a, positions=self.rope, eps=m.norm.eps) if isinstance(a, MLA) else evolve(a, rope=self.rope)
        return evolve(m, attention=attention)


def flavors_of(target: Target) -> tuple[Flavor, ...]:
    """Return the flavors that a release of torchtitan has."""
    return tuple(one for one in FLAVORS if target is Target.TORCHTITAN_0_3 or not one.only_newest)


def find_flavor(m: DecoderModel, target: Target) -> Flavor | None:
    """Return the flavor of this release that has the decoder's weights and FLOPs; None if there is none."""
    return next((flavor for flavor in flavors_of(target) if _shape(flavor.decoder) == _shape(m)), None)


def named_flavor(model: str, name: str) -> Flavor | None:
    """Return a flavor by the names of its model and of itself; None if there is none."""
    return next((one for one in FLAVORS if (one.model, one.name.lower()) == (model, name.lower())), None)


def _shape(m: DecoderModel) -> tuple[object, ...]:
    """Return everything that changes weights or FLOPs: all but rotary positions, eps and the balancing of experts."""
    ffs = tuple(
        evolve(ff, balance=0.0, balance_over="sequence", corrected=False, best=2) if isinstance(ff, MoE) else ff
        for ff in m.layers
    )
    table, norm = (m.vocab, m.embed, m.tied, m.positions, m.dropout), evolve(m.norm, eps=1e-5)
    return *table, norm, _attention_shape(m.attention, m.embed), m.mtp, ffs


def _attention_shape(a: AttentionLayer, embed: int) -> AttentionLayer:
    if isinstance(a, MLA):
        return evolve(a, positions=_ANY_ROPE, scale=None, eps=1e-6)
    return evolve(
        a,
        kv_heads=a.kv_heads or a.heads,
        head_dim=a.head_dim or embed // a.heads,
        rope=None if a.rope is None else _ANY_ROPE,
        qk_norm=evolve(a.qk_norm, eps=1e-5) if isinstance(a.qk_norm, RMSNorm) else a.qk_norm,
    )


def _decoder(
    vocab: int, embed: int, attention: AttentionLayer, layers: list[FeedForward], tied: bool = False
) -> DecoderModel:
    return DecoderModel(
        name="",
        vocab=vocab,
        embed=embed,
        tied=tied,
        positions=None,
        dropout=0.0,
        norm=RMSNorm(),
        attention=attention,
        layers=tuple(layers),
        layer_starts=(),
        mtp=0,
        layer_per_block=True,
    )


def _llama(name: str, layers: int, heads: int, embed: int, ff: int, *, tied: bool = False) -> Flavor:
    attention = Attention(heads=heads, kv_heads=8, rope=_ANY_ROPE)
    own = "rotary positions of base 500,000, scaled 8 times as in Llama 3.1"
    rope = Rope(500_000, scaling=Llama3Scaling(factor=8.0))
    decoder = _decoder(128256, embed, attention, [SwiGLU(ff)] * layers, tied)
    return Flavor("llama3", name, decoder, own, rope, only_newest=tied)


def _qwen(
    name: str,
    layers: int,
    heads: tuple[int, int],
    embed: int,
    ff: FeedForward,
    *,
    base: int = 10**6,
    tied: bool = False,
) -> Flavor:
    """Return a Qwen3. heads: of queries, and of keys and values."""
    norm = RMSNorm(over="head_dim")
    attention = Attention(heads=heads[0], kv_heads=heads[1], head_dim=128, rope=_ANY_ROPE, qk_norm=norm)
    own = f"rotary positions of base {base:,}" + (", and no balancing of experts" if isinstance(ff, MoE) else "")
    return Flavor("qwen3", name, _decoder(151936, embed, attention, [ff] * layers, tied), own, Rope(base))


def _deepseek(name: str, vocab: int, heads: int, q_rank: int | None, embed: int, layers: list[FeedForward]) -> Flavor:
    attention = MLA(heads=heads, q_rank=q_rank, kv_rank=512, nope=128, rope=64, v=128, positions=_ANY_ROPE)
    own = "eps 1e-5, rotary positions scaled beyond 4,096 tokens, and experts balanced by biases"
    rope = Rope(10_000, interleaved=True)  # stretched beyond 4,096 tokens
    return Flavor("deepseek_v3", name, _decoder(vocab, embed, attention, layers), own, rope)


_V2_LITE = MoE(SwiGLU(1408), 64, 6, shared=SwiGLU(2 * 1408), normalize=False)
_V2 = MoE(SwiGLU(1536), 160, 6, shared=SwiGLU(2 * 1536), normalize=False, scale=16.0, groups=8, top_groups=3)
_V3 = MoE(SwiGLU(2048), 256, 8, shared=SwiGLU(2048), score="sigmoid", scale=2.5, groups=8, top_groups=4)
FLAVORS = (
    _llama("1B", 16, 32, 2048, 8192, tied=True),
    _llama("3B", 28, 24, 3072, 8192, tied=True),
    _llama("8B", 32, 32, 4096, 14336),
    _llama("70B", 80, 64, 8192, 28672),
    _llama("405B", 126, 128, 16384, 53248),
    _qwen("0.6B", 28, (16, 8), 1024, SwiGLU(3072), tied=True),
    _qwen("1.7B", 28, (16, 8), 2048, SwiGLU(6144), tied=True),
    _qwen("4B", 36, (32, 8), 2560, SwiGLU(9728), tied=True),
    _qwen("8B", 36, (32, 8), 4096, SwiGLU(12288)),
    _qwen("14B", 40, (40, 8), 5120, SwiGLU(17408)),
    _qwen("32B", 64, (64, 8), 5120, SwiGLU(25600)),
    _qwen("30B-A3B", 48, (32, 4), 2048, MoE(SwiGLU(768), 128, 8)),
    _qwen("235B-A22B", 94, (64, 4), 4096, MoE(SwiGLU(1536), 128, 8), base=5 * 10**6),
    _deepseek("16B", 102400, 16, None, 2048, [SwiGLU(10944), *[_V2_LITE] * 26]),
    _deepseek("236B", 102400, 128, 1536, 5120, [SwiGLU(12288), *[_V2] * 59]),
    _deepseek("671B", 129280, 128, 1536, 7168, [*[SwiGLU(18432)] * 3, *[_V3] * 58]),
)
