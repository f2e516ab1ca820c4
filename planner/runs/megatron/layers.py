"""Layers of a model from Megatron-LM's arguments: attention, feed-forward, experts, norms.

The meaning of each argument is that of megatron-core 0.16.1. It is the inverse of planner/export/megatron_lm_layers.py.
"""

from __future__ import annotations

from math import isclose, log
from typing import cast

from attrs import evolve

from megaloom.dsl import (
    MLA,
    MLP,
    Attention,
    GeGLU,
    Layer,
    LayerNorm,
    LinearScaling,
    Llama3Scaling,
    MoE,
    RMSNorm,
    Rope,
    SwiGLU,
    YarnScaling,
)

from .parser import Arguments
from .refusal import refuse_run

YARN_POSITIONS = 4096  # from which megatron-core's YaRN of latent attention stretches


def norm(a: Arguments) -> RMSNorm | LayerNorm:
    """Return the norm of every layer."""
    kind = RMSNorm if a["normalization"] == "RMSNorm" else LayerNorm
    return kind(a["layernorm_epsilon"], plus_one=a["layernorm_zero_centered_gamma"])


def position_embedding(a: Arguments) -> str:
    """Return the kind of positions, with the older flags that Megatron-LM still takes."""
    if a["use_rotary_position_embeddings"]:
        return "rope"
    older = {"absolute": "learned_absolute", "rotary": "rope"}
    kind: str = older.get(a["position_embedding_type"], a["position_embedding_type"])
    return "none" if kind == "learned_absolute" and not a["add_position_embedding"] else kind


def attention(a: Arguments, layer: int = 0) -> Attention | MLA:
    """Return the attention of a layer, counted from 0."""
    if a["multi_latent_attention"]:
        return _latent(a)
    heads, embed = a["num_attention_heads"], a["hidden_size"]
    channels = a["kv_channels"]
    if channels is None:
        if embed % heads:
            refuse_run(a, f"hidden size {embed} does not divide into {heads} heads", "num_attention_heads")
        channels = embed // heads
    bias, rotary = a["add_bias_linear"], position_embedding(a) == "rope"
    made = Attention(
        heads=heads,
        kv_heads=_groups(a, heads),
        head_dim=None if channels * heads == embed else channels,
        rope=_rope(a, channels) if rotary and not _skips(a, "no_rope_freq", layer) else None,
        bias=bias,
        qkv_bias=a["add_qkv_bias"] and not bias,
        dropout=a["attention_dropout"],
        window=None if _skips(a, "window_attn_skip_freq", layer) else _window(a),
        alibi=position_embedding(a) == "alibi",
        sink=a["softmax_type"] == "learnable",
        qk_norm=evolve(norm(a), over="head_dim") if a["qk_layernorm"] else None,
    )
    if a["softmax_type"] == "off-by-one":
        refuse_run(a, "a softmax with one more in its denominator is not modelled", "softmax_type")
    return made


def _groups(a: Arguments, heads: int) -> int | None:
    """Return the number of key/value heads; None for as many as heads."""
    groups = a["num_query_groups"] if a["group_query_attention"] else None
    return None if groups == heads else groups


def _skips(a: Arguments, dest: str, layer: int) -> bool:
    """Return whether a layer is one of those, every so many or by a list, that lack something."""
    if a[dest] is None or (dest == "window_attn_skip_freq" and a["window_size"] is None):
        return False
    pattern = frequency(a, dest)
    if isinstance(pattern, list):
        return bool(pattern[layer]) if dest == "no_rope_freq" else not pattern[layer]
    return pattern > 0 and (layer + 1) % pattern == 0


def _rope(a: Arguments, channels: int) -> Rope | float:
    if a["rope_type"] == "yarn":
        refuse_run(a, "YaRN is read for latent attention only", "rope_type")
    rotated = None if a["rotary_percent"] == 1.0 else int(channels * a["rotary_percent"])
    factor, scaling = a["rotary_seq_len_interpolation_factor"], cast(Llama3Scaling | LinearScaling | None, None)
    if a["use_rope_scaling"]:
        scaling = Llama3Scaling(factor=a["rope_scaling_factor"])
    elif factor not in (None, 1):
        scaling = LinearScaling(factor)
    made = Rope(a["rotary_base"], channels=rotated, interleaved=a["rotary_interleaved"], scaling=scaling)
    return a["rotary_base"] if made == Rope(a["rotary_base"]) else made


def _window(a: Arguments) -> int | None:
    """Return the positions that a token sees, itself included; None for all before it."""
    if a["window_size"] is None:
        return None
    numbers = str(a["window_size"]).strip("()[] ").replace(",", " ").split()
    if len(numbers) != 2 or not all(n.lstrip("-").isdecimal() for n in numbers):
        refuse_run(a, "a window must be two numbers, as in 127,0", "window_size")
    before = int(numbers[0])
    return None if before < 0 else before + 1


def _latent(a: Arguments) -> MLA:
    nope, rope = a["qk_head_dim"], a["qk_pos_emb_head_dim"]
    kind, factor, scale, scaling = a["rope_type"] or "yarn", a["rotary_scaling_factor"], None, None
    if kind == "yarn" and factor > 1:
        scaling = YarnScaling(factor=factor, original=YARN_POSITIONS, attention_factor=1.0)
        scale = (nope + rope) ** -0.5 * (0.1 * a["mscale_all_dim"] * log(factor) + 1) ** 2
        scale = None if isclose(scale, (nope + rope) ** -0.5) else scale
    return MLA(
        heads=a["num_attention_heads"],
        q_rank=a["q_lora_rank"],
        kv_rank=a["kv_lora_rank"],
        nope=nope,
        rope=rope,
        v=a["v_head_dim"],
        positions=Rope(a["rotary_base"], interleaved=True, scaling=scaling),
        scale=scale,
        eps=a["layernorm_epsilon"],
    )


def feed_forward(a: Arguments, ff: int) -> MLP | SwiGLU | GeGLU:
    """Return a feed-forward of this many hidden channels. The fused GELU, used with biases, is the tanh form."""
    bias = a["add_bias_linear"]
    if a["swiglu"]:
        return SwiGLU(ff, bias=bias)
    if a["quick_geglu"]:
        if bias:
            refuse_run(a, "a gated GELU with biases is not modelled", "quick_geglu", "add_bias_linear")
        return GeGLU(ff, "quick_gelu")
    if a["squared_relu"]:
        return MLP(ff, "relu2", bias=bias)
    tanh = a["openai_gelu"] or (bias and a["bias_gelu_fusion"])
    return MLP(ff, "gelu_tanh" if tanh else "gelu", bias=bias)


def hidden_channels(a: Arguments) -> int:
    """Return the hidden channels of the dense feed-forward: 4 h, or 8/3 h rounded down to a multiple of 64 if gated."""
    if a["ffn_hidden_size"] is not None:
        return int(a["ffn_hidden_size"])
    embed = a["hidden_size"]
    return int((4 * embed * 2 / 3) / 64) * 64 if a["swiglu"] else 4 * embed


def has_experts(a: Arguments) -> bool:
    """Return whether the model has experts. Megatron-DeepSpeed calls one expert what is a dense model."""
    return bool(a["num_experts"]) and not (a["deepspeed"] and a["num_experts"] == 1)


def experts(a: Arguments) -> MoE | None:
    """Return the feed-forward of the layers with experts; None for a dense model."""
    count = a["num_experts"]
    if not has_experts(a):
        return None
    shared, top = a["moe_shared_expert_intermediate_size"], a["moe_router_topk"]
    softmax, groups = a["moe_router_score_function"] == "softmax", a["moe_router_num_groups"] or 1
    top_groups = a["moe_router_group_topk"] or 1
    coefficient, over = _balancing(a)
    return MoE(
        feed_forward(a, a["moe_ffn_hidden_size"] or hidden_channels(a)),
        count,
        top,
        coefficient,
        balance_over=over,  # type: ignore[arg-type]
        shared=feed_forward(a, shared) if shared else None,
        score="softmax" if softmax else "sigmoid",
        normalize=not a["moe_router_pre_softmax"] if softmax else top > 1,
        scale=a["moe_router_topk_scaling_factor"] or 1.0,
        groups=groups,
        top_groups=top_groups,
        best=top // top_groups if groups > 1 else 2,
        corrected=a["moe_router_enable_expert_bias"],
    )


def _balancing(a: Arguments) -> tuple[float, str]:
    """Return the coefficient of the balancing loss, and the tokens over which it is taken."""
    kinds, coefficients = a["moe_router_load_balancing_type"], a["moe_aux_loss_coeff"]
    pairs = [(k, c) for k, c in zip(kinds, coefficients, strict=False) if k != "none" and c]
    if len(pairs) > 1:
        refuse_run(a, "several balancing losses in one model are not modelled", "moe_router_load_balancing_type")
    if "sinkhorn" in kinds:
        refuse_run(a, "routing by Sinkhorn's iteration is not modelled", "moe_router_load_balancing_type")
    if not pairs:
        return 0.0, "sequence"
    return pairs[0][1], "batch" if pairs[0][0] == "global_aux_loss" else "sequence"


def layer_kinds(a: Arguments) -> list[bool]:
    """Return for each layer whether it has experts."""
    layers = a["num_layers"]
    if not has_experts(a):
        return [False] * layers
    pattern = frequency(a, "moe_layer_freq")
    if isinstance(pattern, int):
        return [i % pattern == 0 for i in range(layers)]
    return [bool(one) for one in pattern]


def frequency(a: Arguments, dest: str) -> int | list[int]:
    """Return a frequency, or the list of layers that an expression such as [0]*3+[1]*58 stands for."""
    text = str(a[dest]).replace(" ", "").strip("()")
    if text.isdecimal() and int(text) > 0:
        return int(text)
    layers: list[int] = []
    for part in text.replace("+", "\n").split("\n"):
        listed, _, times = part.strip("()").partition("*")
        inner = listed[1:-1].split(",")
        if not (listed.startswith("[") and listed.endswith("]") and all(n.isdecimal() for n in inner)):
            refuse_run(a, "a frequency must be a number, or lists as in [0]*3+[1]*58", dest)
        layers += [int(n) for n in inner] * (int(times) if times.isdecimal() else 1)
    if len(layers) != a["num_layers"]:
        refuse_run(a, f"the list has {len(layers)} layers, but the model {a['num_layers']}", dest)
    return layers


def block_layers(a: Arguments) -> list[tuple[Attention | MLA, Layer]]:
    """Return attention and feed-forward of each layer, equal ones as one object."""
    moe, dense = experts(a), feed_forward(a, hidden_channels(a))
    known: dict[int, Attention | MLA] = {}
    out: list[tuple[Attention | MLA, Layer]] = []
    for i, sparse in enumerate(layer_kinds(a)):
        made = attention(a, i)
        made = known.setdefault(hash(made), made)
        out.append((made, moe if sparse and moe else dense))
    return out
