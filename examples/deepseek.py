"""DeepSeek-V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437): latent attention, many small experts and shared ones."""

from attrs import frozen

from megaloom.dsl import (
    MLA,
    Concat,
    Dim,
    Embed,
    Layer,
    Linear,
    Model,
    MoE,
    RMSNorm,
    Rope,
    Shift,
    SwiGLU,
    Unembed,
    Value,
    YarnScaling,
    apply,
    ids,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.rope import temper

NORM = RMSNorm(1e-6)


def rotary(factor: float = 40, original: int = 4096) -> Rope:
    """Positions stretched by YaRN; the temperature is put on the scores instead (see `scale`)."""
    return Rope(10_000, interleaved=True, scaling=YarnScaling(factor=factor, original=original, attention=1.0))


def scale(channels: int, factor: float = 40, mscale: float = 1.0) -> float:
    """What the scores are multiplied by: channels^-0.5, and YaRN's temperature squared."""
    return float(channels**-0.5 * temper(factor, mscale) ** 2)


@frozen
class Join(Layer):
    """The normalized hidden state of a position and the embedding of the next token, mixed into one.

    Source: multi-token prediction, DeepSeek-V3, arXiv:2412.19437, equation 21.
    """

    table: Value

    def body(self, x: Value, /, tokens: Value, **side: Value) -> Value:
        ahead = apply(Shift("seq", 1), tokens) >> Embed(self.table)
        both = apply(Concat("embed"), ahead >> NORM.named("ahead_norm"), x >> NORM.named("norm"))
        return both >> Linear(x["embed"]).named("join")


def deepseek(
    name: str, attention: MLA, embed: int, *, ff: int, moe: MoE, dense: int, sparse: int, vocab: int, ahead: int = 0
) -> Model:
    """A DeepSeek of any size: `dense` layers, then `sparse` ones. Layers of their own predict `ahead` tokens more."""
    v, d = Dim("vocab", vocab), Dim("embed", embed)
    wte, head = weight("wte", v, d), weight("head", v, d)
    mix = residual(NORM, attention)
    block = mix >> residual(NORM, moe)
    tokens = ids()
    x = tokens >> Embed(wte) >> repeat(dense, mix, residual(NORM, SwiGLU(ff))) >> repeat(sparse, block)
    outputs = [x >> NORM >> Unembed(head)]
    for i in range(ahead):
        tokens = apply(Shift("seq", 1), tokens) if i else tokens
        x = x >> repeat(1, Join(wte).given(tokens=tokens), block)
        outputs.append(x >> NORM >> Unembed(head))
    return model(name, *outputs)


def latent(heads: int, q_rank: int | None, mscale: float) -> MLA:
    """The attention of all of them: they differ in heads, in the queries' rank and in YaRN's temperature."""
    s = scale(128 + 64, mscale=mscale)
    return MLA(heads=heads, q_rank=q_rank, kv_rank=512, nope=128, rope=64, v=128, positions=rotary(), scale=s)


def deepseek_v2_lite() -> Model:
    """DeepSeek-V2-Lite, 15.7 billion parameters."""
    moe = MoE(SwiGLU(1408), 64, 6, balance=0.001, shared=SwiGLU(2 * 1408), normalize=False)
    attention = latent(16, None, 0.707)
    return deepseek("deepseek-v2-lite", attention, 2048, ff=10944, moe=moe, dense=1, sparse=26, vocab=102400)


def deepseek_v2() -> Model:
    """DeepSeek-V2, 236 billion parameters: experts of the best three of eight groups, by each group's best expert."""
    moe = MoE(
        SwiGLU(1536),
        160,
        6,
        balance=0.003,
        shared=SwiGLU(2 * 1536),
        normalize=False,
        scale=16.0,
        groups=8,
        top_groups=3,
        best=1,
    )
    attention = latent(128, 1536, 0.707)
    return deepseek("deepseek-v2", attention, 5120, ff=12288, moe=moe, dense=1, sparse=59, vocab=102400)


def deepseek_v3(ahead: int = 0) -> Model:
    """DeepSeek-V3, 671 billion parameters, without what predicts tokens further ahead."""
    moe = MoE(
        SwiGLU(2048),
        256,
        8,
        balance=0.0001,
        shared=SwiGLU(2048),
        score="sigmoid",
        corrected=True,
        scale=2.5,
        groups=8,
        top_groups=4,
    )
    name, attention = "deepseek-v3-mtp" if ahead else "deepseek-v3", latent(128, 1536, 1.0)
    return deepseek(name, attention, 7168, ff=18432, moe=moe, dense=3, sparse=58, vocab=129280, ahead=ahead)


def deepseek_v3_mtp() -> Model:
    """DeepSeek-V3 as it was trained: a layer more predicts the token after the next."""
    return deepseek_v3(ahead=1)
