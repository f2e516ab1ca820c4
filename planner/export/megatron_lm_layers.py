"""Megatron-LM's options for the layers of a decoder: attention, feed-forward, experts.

The meaning of each option is that of megatron-core 0.16.1. A layer that computes anything else is refused.
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
from megaloom.dsl.show.formatting import declared

from .decoder import DecoderModel
from .option import Option, option
from .target import Target, refuse

DenseFeedForward = MLP | SwiGLU | GeGLU
_NO_OPTION = ("softcap", "alibi", "relative", "gated")  # fields of attention without an option


def attention_options(m: DecoderModel, target: Target) -> Iterator[Option]:
    """Yield the options of attention, which is equal in all layers, and of positions."""
    a = m.attention
    yield option("num-attention-heads", a.heads)
    if isinstance(a, MLA):
        yield from _latent(m, a, target)
    else:
        yield from _grouped(m, a, target)
    if _has_biases(m):
        return
    yield option("disable-bias-linear")
    if isinstance(a, Attention) and a.qkv_bias:
        yield option("add-qkv-bias")


def _grouped(m: DecoderModel, a: Attention, target: Target) -> Iterator[Option]:
    for name in _NO_OPTION:
        if getattr(a, name):
            refuse(target, f"attention with {name}={getattr(a, name)}")
    if not a.causal:
        refuse(target, "attention with causal=False: its decoder is causal")
    channels = m.embed // a.heads if a.head_dim is None else a.head_dim
    if a.scale is not None and not isclose(a.scale, channels**-0.5):
        refuse(
            target,
            f"attention with scale={a.scale:g}: it always multiplies scores by head_dim^-0.5 = {channels**-0.5:g}",
        )
    if a.kv_heads not in (None, a.heads):
        yield option("group-query-attention")
        yield option("num-query-groups", a.kv_heads)
    yield option("kv-channels", channels)
    yield from _positions(m, a, channels, target)
    if a.window:
        yield option("window-size", f"{a.window - 1},0")  # positions before and after, the position itself not counted
    if a.sink:
        yield option("softmax-type", "learnable")
    if a.qk_norm is not None:
        if a.qk_norm != evolve(m.norm, over="head_dim"):
            refuse(
                target,
                f"attention with qk_norm={declared(a.qk_norm)} and norms {declared(m.norm)}: it has one kind of norm",
            )
        yield option("qk-layernorm")


def _positions(m: DecoderModel, a: Attention, channels: int, target: Target) -> Iterator[Option]:
    if a.rope is None:
        yield option("position-embedding-type", "none" if m.positions is None else "learned_absolute")
        return
    if m.positions is not None:
        refuse(target, "learned and rotary positions in one model")
    rope = a.rope if isinstance(a.rope, Rope) else Rope(a.rope)
    yield option("position-embedding-type", "rope")
    yield _base(rope, target)
    if rope.channels not in (None, channels):
        yield option("rotary-percent", (rope.channels or channels) / channels)
    if rope.interleaved:
        yield option("rotary-interleaved")
    if rope.scaling is not None:
        yield from _rope_scaling(rope, target)


def _base(rope: Rope, target: Target) -> Option:
    if rope.theta != int(rope.theta):
        refuse(target, f"a rotary base of {rope.theta}: it takes whole numbers only")
    return option("rotary-base", int(rope.theta))


def _rope_scaling(rope: Rope, target: Target) -> Iterator[Option]:
    s = rope.scaling
    if isinstance(s, LinearScaling) and s.factor == int(s.factor) and s.magnitude == 1.0:
        yield option("rotary-seq-len-interpolation-factor", int(s.factor))
    elif isinstance(s, Llama3Scaling) and s == Llama3Scaling(factor=s.factor):
        yield option("use-rope-scaling")
        yield option("rope-scaling-factor", float(s.factor))
    else:
        refuse(
            target,
            f"rotary positions with {declared(s)}: it has linear scaling by whole numbers, and Llama 3.1's",
        )


def _latent(m: DecoderModel, a: MLA, target: Target) -> Iterator[Option]:
    """Yield the options of latent attention: interleaved rotary positions, and one kind of norm for all tensors."""
    if m.positions is not None:
        refuse(target, "learned and rotary positions in one model")
    if a.eps != m.norm.eps or m.norm.plus_one:
        refuse(target, f"latent attention with eps={a.eps} and norms {declared(m.norm)}: it has one kind of norm")
    if not a.positions.interleaved or a.positions.channels is not None:
        refuse(
            target,
            f"latent attention with positions={declared(a.positions)}: it rotates all channels, interleaved",
        )
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
    yield option("no-rope-fusion")  # its fused kernel for latent attention is experimental, and for YaRN only


def _yarn(a: MLA, target: Target) -> Iterator[Option]:
    """Yield the options of YaRN. Megatron-LM multiplies scores by (0.1 m ln(factor) + 1)² channels^-0.5.

    m is --mscale-all-dim; channels are those of a query.
    """
    s, default = a.positions.scaling, (a.nope + a.rope) ** -0.5
    scale = default if a.scale is None else a.scale
    if s is None and isclose(scale, default):
        yield option("rope-type", "rope")
        return
    if not isinstance(s, YarnScaling) or s != YarnScaling(factor=s.factor, original=4096, attention_factor=1.0):
        refuse(
            target,
            f"latent attention with positions={declared(a.positions)}: its YaRN starts from 4096 positions",
        )
    m = round((sqrt(scale / default) - 1) / (0.1 * log(s.factor)), 6) if s.factor > 1 else 0.0
    if not isclose(scale, default * (0.1 * m * log(s.factor) + 1) ** 2, rel_tol=1e-6):
        refuse(target, f"latent attention with scale={scale:g}: no --mscale-all-dim gives that")
    yield option("rope-type", "yarn")
    yield option("rotary-scaling-factor", float(s.factor))
    yield option("mscale", m)
    yield option("mscale-all-dim", m)


def _has_biases(m: DecoderModel) -> bool:
    """Return whether all projections have biases, those of feed-forwards included."""
    return isinstance(m.attention, Attention) and m.attention.bias


def feed_forward_options(m: DecoderModel, target: Target) -> Iterator[Option]:
    """Yield the options of the feed-forward without experts, and of the activation, which experts share."""
    dense, bias = m.dense or (m.moe and m.moe.expert), _has_biases(m)
    if not isinstance(dense, DenseFeedForward) or (m.moe and not _same_kind(m.moe.expert, dense)):
        refuse(target, f"experts and dense layers of different kinds: {declared(m.moe)}")
    given = isinstance(dense, MLP | SwiGLU) and dense.bias
    if given is not bias:
        all_or_none = "either all projections have biases or none"
        wrong = all_or_none if given or isinstance(dense, MLP) else "all its projections would have biases"
        refuse(target, f"{declared(dense)} with {declared(m.attention)}: {wrong}")
    yield option("ffn-hidden-size", dense.ff)
    yield from _activation(dense, target)


def _same_kind(one: object, other: object) -> bool:
    """Return whether two feed-forwards are equal but for their width."""
    return isinstance(one, DenseFeedForward) and type(one) is type(other) and evolve(one, ff=1) == evolve(other, ff=1)


def _activation(dense: DenseFeedForward, target: Target) -> Iterator[Option]:
    """Yield the options of the activation. Megatron-LM's fused GELU, used with biases, is the tanh form."""
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
        refuse(
            target,
            f"{declared(dense)}: it has SwiGLU, quick_gelu GeGLU, relu2, gelu, and gelu_tanh with a bias",
        )


def expert_options(m: DecoderModel, target: Target) -> Iterator[Option]:
    """Yield the options of the layers with experts; none for a dense model."""
    moe = m.moe
    if moe is None:
        return
    if _has_biases(m) or moe.bias:
        refuse(target, f"biases in experts or routers: {declared(moe)}")
    yield option("num-experts", moe.experts)
    if m.dense:
        yield option("moe-layer-freq", layer_pattern([isinstance(ff, MoE) for ff in m.layers]))
    yield option("moe-ffn-hidden-size", moe.expert.ff)  # type: ignore[attr-defined]
    yield option("moe-router-topk", moe.top_k)
    yield from _router(moe, target)
    yield option("moe-router-dtype", "fp32")
    if moe.shared is not None:
        if not _same_kind(moe.shared, moe.expert):
            refuse(target, f"shared experts of another kind than the routed ones: {declared(moe)}")
        yield option("moe-shared-expert-intermediate-size", moe.shared.ff)  # type: ignore[attr-defined]
    yield option("moe-router-load-balancing-type", _balancing(moe))
    if moe.balance:
        yield option("moe-aux-loss-coeff", moe.balance)
    yield option("moe-token-dispatcher-type", "alltoall")


def _balancing(moe: MoE) -> str:
    """Return the kind of balancing loss. Over the batch, Megatron-LM counts the micro-batches run so far."""
    if not moe.balance:
        return "none"
    return "seq_aux_loss" if moe.balance_over == "sequence" else "global_aux_loss"


def _router(moe: MoE, target: Target) -> Iterator[Option]:
    """Yield the options of the router. A softmax is over the chosen scores, or over all with pre-softmax."""
    softmax = moe.score == "softmax"
    if softmax and (moe.corrected or (moe.groups > 1 and moe.normalize)):
        refuse(target, f"a softmax router with corrected={moe.corrected}, groups={moe.groups}")
    if moe.normalize is (moe.top_k == 1) and not (softmax and moe.top_k > 1):
        refuse(target, f"a router with score={moe.score!r}, normalize={moe.normalize}, top_k={moe.top_k}")
    if moe.groups > 1 and moe.best != moe.top_k // moe.top_groups:
        each = f"top_k / top_groups = {moe.top_k // moe.top_groups}"
        refuse(target, f"a router with best={moe.best}: it ranks groups by their best {each} scores")
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


def layer_pattern(sparse: list[bool]) -> str:
    """Return a Python expression for the list of layers, 1 for each with experts: [0]*3+[1]*58.

    >>> layer_pattern([False, True, True])
    '[0]+[1]*2'
    """
    out: list[tuple[bool, int]] = []
    for one in sparse:
        times = out.pop()[1] if out and out[-1][0] is one else 0
        out.append((one, times + 1))
    return "+".join(f"[{int(one)}]" + (f"*{times}" if times > 1 else "") for one, times in out)
