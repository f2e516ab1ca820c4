"""Qwen 3 (arXiv:2505.09388): norms on queries and keys instead of biases; dense, or a mixture of 128 experts."""

from collections.abc import Mapping
from itertools import groupby

from megaloom.dsl import (
    Attention,
    Dim,
    Embed,
    Layer,
    Model,
    MoE,
    NextToken,
    RMSNorm,
    Rope,
    SwiGLU,
    Unembed,
    ids,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.hf.architectures import Config, reads, rope
from megaloom.dsl.hf.tensor_names import columns, flat, rows

from .llama3 import (
    ATTENTION,
    NORMS,
    SWIGLU,
    decoder,
)
from .qwen2 import windowless


def qwen3(
    name: str,
    layers: int,
    heads: int,
    kv_heads: int,
    embed: int,
    ff: Layer,
    *,
    vocab: int = 151936,
    head_dim: int = 128,
    rope: float | Rope = 1e6,
    tied: bool = False,
    eps: float = 1e-6,
    attention_dropout: float = 0.0,
    dense: Mapping[int, Layer] | None = None,
) -> Model:
    """A Qwen 3 of any size; `ff` is SwiGLU(...), or a MoE of them. dense: other layers by number, in place of `ff`."""
    v, d = Dim("vocab", vocab), Dim("embed", embed)
    wte = weight("wte", v, d)
    head = wte if tied else weight("head", v, d)
    norm = RMSNorm(eps, over="head_dim")
    attention = Attention(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope=rope, qk_norm=norm, dropout=attention_dropout
    )
    x = ids() >> Embed(wte)
    for one, run in groupby((dense or {}).get(i, ff) for i in range(layers)):
        block = residual(RMSNorm(eps), attention) >> residual(RMSNorm(eps), one)
        x = x >> repeat(len(list(run)), block)
    return model(name, x >> RMSNorm(eps) >> Unembed(head) >> NextToken())


def qwen3_0_6b() -> Model:
    return qwen3("qwen3-0.6b", 28, 16, 8, 1024, SwiGLU(3072), tied=True)


def qwen3_1_7b() -> Model:
    return qwen3("qwen3-1.7b", 28, 16, 8, 2048, SwiGLU(6144), tied=True)


def qwen3_4b() -> Model:
    return qwen3("qwen3-4b", 36, 32, 8, 2560, SwiGLU(9728), tied=True)


def qwen3_8b() -> Model:
    return qwen3("qwen3-8b", 36, 32, 8, 4096, SwiGLU(12288))


def qwen3_14b() -> Model:
    return qwen3("qwen3-14b", 40, 40, 8, 5120, SwiGLU(17408))


def qwen3_32b() -> Model:
    return qwen3("qwen3-32b", 64, 64, 8, 5120, SwiGLU(25600))


def qwen3_30b_a3b() -> Model:
    return qwen3("qwen3-30b-a3b", 48, 32, 4, 2048, MoE(SwiGLU(768), 128, 8, balance=0.001, balance_over="batch"))


def qwen3_235b_a22b() -> Model:
    return qwen3("qwen3-235b-a22b", 94, 64, 4, 4096, MoE(SwiGLU(1536), 128, 8, balance=0.001, balance_over="batch"))


MIX = NORMS | ATTENTION | {f"self_attn.{n}_norm.weight": flat(f"attention.0.{n}_norm.scale") for n in "qk"}
EXPERTS = {
    "mlp.gate.weight": columns("moe.0.router"),
    "mlp.experts.{experts}.gate_proj.weight": columns("moe.0.experts.gate"),
    "mlp.experts.{experts}.up_proj.weight": columns("moe.0.experts.up"),
    "mlp.experts.{experts}.down_proj.weight": rows("moe.0.experts.down"),
}


@reads("Qwen3ForCausalLM", names=decoder(MIX | SWIGLU))
def config(c: Config, name: str) -> Model:
    return _read(c, name, SwiGLU(c.whole("intermediate_size")))


@reads("Qwen3MoeForCausalLM", names=decoder(MIX | EXPERTS | SWIGLU))
def sparse_config(c: Config, name: str) -> Model:
    c.only("shared_expert_intermediate_size", 0, default=0)
    moe = MoE(
        SwiGLU(c.whole("moe_intermediate_size")),
        c.whole(c.first_present("num_experts", "num_local_experts")),
        c.whole("num_experts_per_tok"),
        balance=c.balancing("router_aux_loss_coef", 0.001),
        balance_over="batch",  # Qwen3, arXiv:2505.09388, section 2
        normalize=c.flag("norm_topk_prob", False),
    )
    return _read(c, name, moe, head_dim=None, dense=dense_layers(c))  # head_dim: embed / heads if the config has none


def dense_layers(c: Config) -> dict[int, Layer]:
    """Return the layers without experts: those listed, and all but every `decoder_sparse_step`-th."""
    c.ignore("intermediate_size")  # of these layers; unused if there are none
    layers, step = range(c.layers("num_hidden_layers")), c.whole("decoder_sparse_step", 1)
    listed = c.array("mlp_only_layers", [])
    if any(type(i) is not int for i in listed):
        raise c.unsupported("mlp_only_layers", "supported: an array of numbers of layers, from 0")
    numbers = [i for i in layers if i in listed or (i + 1) % step]
    return dict.fromkeys(numbers, SwiGLU(c.whole("intermediate_size"))) if numbers else {}


def _read(
    c: Config, name: str, ff: Layer, *, head_dim: int | None = 128, dense: Mapping[int, Layer] | None = None
) -> Model:
    windowless(c)
    c.only("qkv_bias", False, default=False)  # Qwen3-Coder's configs name what the architecture fixes
    c.only("use_qk_norm", True, default=True)
    c.only("hidden_act", "silu", default="silu")
    c.only("attention_bias", False, default=False)
    heads, embed = c.whole("num_attention_heads"), c.whole("hidden_size")
    return qwen3(
        name,
        layers=c.layers("num_hidden_layers"),
        heads=heads,
        kv_heads=c.whole("num_key_value_heads", heads),
        embed=embed,
        ff=ff,
        vocab=c.whole("vocab_size"),
        head_dim=c.whole("head_dim", head_dim or embed // heads),
        rope=rope(c, 10_000.0),
        tied=c.flag("tie_word_embeddings", False),
        attention_dropout=c.rate("attention_dropout", 0.0),
        eps=c.number("rms_norm_eps", 1e-6),
        dense=dense,
    )
