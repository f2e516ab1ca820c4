"""The layers of a decoder in Megatron-LM's options: attention, feed-forward, experts.

What each option means was read off megatron-core 0.16.1; where a layer computes something else, it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isclose, log, sqrt

from attrs import evolve

from megaloom.dsl import (
    MLA,
    MLP,
    Attention,
    GeGLU,
    LinearScaling,
    Llama3Scaling,
    MoE,
    Rope,
    SwiGLU,
    YarnScaling,
)
from megaloom.dsl.show.words import written

from .decoder import GPT, cannot
from .option import Option, option

Dense = MLP | SwiGLU | GeGLU
UNSAID = ("softcap", "alibi", "relative")  # fields of attention that no option is for


def attention(m: GPT, target: str) -> Iterator[Option]:
    """The options of the attention that all layers have, and of positions."""
    a = m.attention
    yield option("num-attention-heads", a.heads)
    if isinstance(a, MLA):
        yield from _latent(m, a, target)
    else:
        yield from _grouped(m, a, target)
    if biased(m):
        return
    yield option("disable-bias-linear")
    if isinstance(a, Attention) and a.qkv_bias:
        yield option("add-qkv-bias")


def _grouped(m: GPT, a: Attention, target: str) -> Iterator[Option]:
    for name in UNSAID:
        if getattr(a, name):
            cannot(target, f"attention with {name}={getattr(a, name)}")
    if not a.causal:
        cannot(target, "attention with causal=False: it trains a decoder")
    channels = m.embed // a.heads if a.head_dim is None else a.head_dim
    if a.scale is not None and not isclose(a.scale, channels**-0.5):
        cannot(target, f"attention with scale={a.scale:g}: it multiplies scores by {channels}^-0.5 always")
    if a.kv_heads not in (None, a.heads):
        yield option("group-query-attention")
        yield option("num-query-groups", a.kv_heads)
    yield option("kv-channels", channels)
    yield from _positions(m, a, channels, target)
    if a.window:
        yield option("window-size", f"{a.window - 1},0")  # how far back and ahead, the position itself not counted
    if a.sink:
        yield option("softmax-type", "learnable")
    if a.qk_norm is not None:
        if a.qk_norm != evolve(m.norm, over="head_dim"):
            cannot(target, f"attention with qk_norm={a.qk_norm} among {written(m.norm)}: it normalizes all alike")
        yield option("qk-layernorm")


def _positions(m: GPT, a: Attention, channels: int, target: str) -> Iterator[Option]:
    if a.rope is None:
        yield option("position-embedding-type", "none" if m.positions is None else "learned_absolute")
        return
    if m.positions is not None:
        cannot(target, "learned positions and rotary ones in one model")
    rope = a.rope if isinstance(a.rope, Rope) else Rope(a.rope)
    yield option("position-embedding-type", "rope")
    yield _base(rope, target)
    if rope.channels not in (None, channels):
        yield option("rotary-percent", (rope.channels or channels) / channels)
    if rope.interleaved:
        yield option("rotary-interleaved")
    if rope.scaling is not None:
        yield from _stretched(rope, target)


def _base(rope: Rope, target: str) -> Option:
    if rope.theta != int(rope.theta):
        cannot(target, f"a rotary base of {rope.theta}: it takes a whole number")
    return option("rotary-base", int(rope.theta))


def _stretched(rope: Rope, target: str) -> Iterator[Option]:
    s = rope.scaling
    if isinstance(s, LinearScaling) and s.factor == int(s.factor) and s.magnitude == 1.0:
        yield option("rotary-seq-len-interpolation-factor", int(s.factor))
    elif isinstance(s, Llama3Scaling) and s == Llama3Scaling(factor=s.factor):
        yield option("use-rope-scaling")
        yield option("rope-scaling-factor", float(s.factor))
    else:
        cannot(target, f"positions stretched by {written(s)}: it stretches by a whole number, or as Llama 3.1 does")


def _latent(m: GPT, a: MLA, target: str) -> Iterator[Option]:
    """Latent attention turns pairs of neighbouring channels, and normalizes its short vectors as all else."""
    if m.positions is not None:
        cannot(target, "learned positions and rotary ones in one model")
    if a.eps != m.norm.eps or m.norm.plus_one:
        cannot(target, f"latent attention with eps={a.eps} among {written(m.norm)}: it normalizes all alike")
    if not a.positions.interleaved or a.positions.channels is not None:
        cannot(target, f"latent attention with positions={written(a.positions)}: all its channels turn, interleaved")
    yield option("multi-latent-attention")
    if a.q_rank is not None:
        yield option("q-lora-rank", a.q_rank)
    yield option("kv-lora-rank", a.kv_rank)
    yield option("qk-head-dim", a.nope)
    yield option("qk-pos-emb-head-dim", a.rope)
    yield option("v-head-dim", a.v)
    yield option("kv-channels", a.v)
    yield option("qk-layernorm")
    yield option("position-embedding-type", "rope")
    yield _base(a.positions, target)
    yield from _yarn(a, target)
    yield option("no-rope-fusion")  # with latent attention it is an experiment, for YaRN only


def _yarn(a: MLA, target: str) -> Iterator[Option]:
    """Megatron-LM multiplies the scores by (0.1 m ln(factor) + 1)² channels^-0.5, m being --mscale-all-dim."""
    s, usual = a.positions.scaling, (a.nope + a.rope) ** -0.5
    scale = usual if a.scale is None else a.scale
    if s is None and isclose(scale, usual):
        yield option("rope-type", "rope")
        return
    if not isinstance(s, YarnScaling) or s != YarnScaling(factor=s.factor, original=4096, attention_factor=1.0):
        cannot(target, f"latent attention with positions={written(a.positions)}: it has YaRN from 4096 positions on")
    m = round((sqrt(scale / usual) - 1) / (0.1 * log(s.factor)), 6) if s.factor > 1 else 0.0
    if not isclose(scale, usual * (0.1 * m * log(s.factor) + 1) ** 2, rel_tol=1e-6):
        cannot(target, f"latent attention with scale={scale:g}")
    yield option("rope-type", "yarn")
    yield option("rotary-scaling-factor", float(s.factor))
    yield option("mscale", m)
    yield option("mscale-all-dim", m)


def biased(m: GPT) -> bool:
    """Whether all projections have biases."""
    return isinstance(m.attention, Attention) and m.attention.bias


def feed_forward(m: GPT, target: str) -> Iterator[Option]:
    """The options of the feed-forward of layers without experts, and of the activation, which experts share."""
    dense, bias = m.dense or (m.moe and m.moe.expert), biased(m)
    if not isinstance(dense, Dense) or (m.moe and not _alike(m.moe.expert, dense)):
        cannot(target, f"experts that differ from the other feed-forwards: {written(m.moe)}")
    if isinstance(dense, MLP) and dense.bias is not bias:
        cannot(target, f"{written(dense)} under {written(m.attention)}: either both have biases or none has")
    if not isinstance(dense, MLP) and bias:
        cannot(target, f"{written(dense)} under {written(m.attention)}: all its projections would have biases")
    yield option("ffn-hidden-size", dense.ff)
    yield from _activation(dense, target)


def _alike(one: object, other: object) -> bool:
    """Whether two feed-forwards differ in width alone."""
    return isinstance(one, Dense) and type(one) is type(other) and evolve(one, ff=1) == evolve(other, ff=1)


def _activation(dense: Dense, target: str) -> Iterator[Option]:
    """Megatron-LM's fused gelu is the one by tanh, its plain one is exact; without biases it never fuses."""
    if isinstance(dense, SwiGLU):
        yield option("swiglu")
    elif isinstance(dense, GeGLU) and dense.act == "quick_gelu":
        yield option("quick-geglu")
    elif isinstance(dense, MLP) and dense.act in ("relu2", "gelu"):
        if dense.act == "relu2":
            yield option("squared-relu")
        if dense.bias:
            yield option("no-bias-gelu-fusion")
    elif not (isinstance(dense, MLP) and dense.act == "gelu_tanh" and dense.bias):
        cannot(target, f"{written(dense)}: it has SwiGLU, relu2, gelu, quick_gelu gated, and gelu_tanh with a bias")


def experts(m: GPT, target: str) -> Iterator[Option]:
    """The options of the layers with experts, if there are any."""
    moe = m.moe
    if moe is None:
        return
    if biased(m) or moe.bias:
        cannot(target, f"experts or routers with biases: {written(moe)}")
    yield option("num-experts", moe.experts)
    if m.dense:
        yield option("moe-layer-freq", pattern([isinstance(ff, MoE) for ff in m.layers]))
    yield option("moe-ffn-hidden-size", moe.expert.ff)  # type: ignore[attr-defined]
    yield option("moe-router-topk", moe.top_k)
    yield from _gate(moe, target)
    yield option("moe-router-dtype", "fp32")
    if moe.shared is not None:
        if not _alike(moe.shared, moe.expert):
            cannot(target, f"shared experts of another kind than the others: {written(moe)}")
        yield option("moe-shared-expert-intermediate-size", moe.shared.ff)  # type: ignore[attr-defined]
    yield option("moe-router-load-balancing-type", "aux_loss" if moe.balance else "none")
    if moe.balance:
        yield option("moe-aux-loss-coeff", moe.balance)
    yield option("moe-token-dispatcher-type", "alltoall")


def _gate(moe: MoE, target: str) -> Iterator[Option]:
    """By softmax the chosen scores add up to 1, or all do (--moe-router-pre-softmax); by sigmoid the chosen ones."""
    softmax = moe.score == "softmax"
    if softmax and (moe.corrected or (moe.groups > 1 and moe.normalize)):
        cannot(target, f"experts chosen by a softmax with corrected={moe.corrected}, groups={moe.groups}")
    if moe.normalize is (moe.top_k == 1) and not (softmax and moe.top_k > 1):
        cannot(target, f"experts with score={moe.score!r}, normalize={moe.normalize}, top_k={moe.top_k}")
    if moe.groups > 1 and moe.best != moe.top_k // moe.top_groups:
        each = f"top_k / top_groups = {moe.top_k // moe.top_groups}"
        cannot(target, f"experts with best={moe.best}: it chooses groups by the {each} best of each")
    if not softmax:
        yield option("moe-router-score-function", "sigmoid")
    elif not moe.normalize:
        yield option("moe-router-pre-softmax")
    if moe.corrected:
        yield option("moe-router-enable-expert-bias")
    if moe.groups > 1:
        yield option("moe-router-num-groups", moe.groups)
        yield option("moe-router-group-topk", moe.top_groups)
    if moe.scale != 1.0:
        yield option("moe-router-topk-scaling-factor", moe.scale)


def pattern(sparse: list[bool]) -> str:
    """Which layers have experts, as a Python expression: [0]*3+[1]*58.

    >>> pattern([False, True, True])
    '[0]+[1]*2'
    """
    out: list[tuple[bool, int]] = []
    for one in sparse:
        times = out.pop()[1] if out and out[-1][0] is one else 0
        out.append((one, times + 1))
    return "+".join(f"[{int(one)}]" + (f"*{times}" if times > 1 else "") for one, times in out)
