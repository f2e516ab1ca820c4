"""GPT-OSS (arXiv:2508.10925): a window in every other layer, attention sinks, experts with biases and clamps."""

from megaloom.dsl import (
    Attention,
    ClampedGLU,
    Dim,
    Embed,
    Layer,
    Model,
    MoE,
    NextToken,
    RMSNorm,
    Rope,
    Unembed,
    YarnScaling,
    ids,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.hf.architectures import Config, reads, rotation
from megaloom.dsl.hf.tensor_names import (
    JOIN,
    Stored,
    columns,
    flat,
)

from .llama3 import ATTENTION, NORMS, decoder

STRETCHED = Rope(150_000, scaling=YarnScaling(factor=32, original=4096, truncate=False))


def gpt_oss(
    name: str,
    layers: int,
    experts: int,
    *,
    heads: int = 64,
    kv_heads: int = 8,
    head_dim: int = 64,
    embed: int = 2880,
    ff: int = 2880,
    top_k: int = 4,
    window: int = 128,
    limit: float = 7.0,
    vocab: int = 201088,
    balance: float = 0.9,
    rope: Rope = STRETCHED,
    attention_dropout: float = 0.0,
) -> Model:
    """A GPT-OSS of any size, with an even number of layers."""

    def block(window: int | None) -> Layer:
        attention = Attention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=rope,
            bias=True,
            sink=True,
            window=window,
            dropout=attention_dropout,
        )
        moe = MoE(ClampedGLU(ff, limit), experts, top_k, balance=balance, bias=True)
        return residual(RMSNorm(), attention) >> residual(RMSNorm(), moe)

    v, d = Dim("vocab", vocab), Dim("embed", embed)
    x = ids() >> Embed(weight("wte", v, d)) >> repeat(layers // 2, block(window), block(None))
    return model(name, x >> RMSNorm() >> Unembed(weight("head", v, d)) >> NextToken())


def gpt_oss_20b() -> Model:
    return gpt_oss("gpt-oss-20b", 24, 32)


def gpt_oss_120b() -> Model:
    return gpt_oss("gpt-oss-120b", 36, 128)


LAYER = (
    NORMS
    | ATTENTION
    | {f"self_attn.{n}_proj.bias": flat(f"attention.0.{n}_bias") for n in "qkvo"}
    | {
        "self_attn.sinks": flat("attention.0.sinks"),
        "mlp.router.weight": columns("moe.0.router"),
        "mlp.router.bias": flat("moe.0.router_bias"),
        "mlp.experts.gate_up_proj": Stored(
            ("moe.0.experts.gate", "moe.0.experts.up"), ("experts", "embed", ("ff", JOIN, 1))
        ),
        "mlp.experts.gate_up_proj_bias": Stored(
            ("moe.0.experts.gate_bias", "moe.0.experts.up_bias"), ("experts", ("ff", JOIN, 1))
        ),
        "mlp.experts.down_proj": Stored(("moe.0.experts.down",), ("experts", "ff", "embed")),
        "mlp.experts.down_proj_bias": Stored(("moe.0.experts.down_bias",), ("experts", "embed")),
    }
)


@reads("GptOssForCausalLM", names=decoder(LAYER))
def config(c: Config, name: str) -> Model:
    c.only("hidden_act", "silu", default="silu")
    c.only("rms_norm_eps", 1e-5, default=1e-5)
    c.only("attention_bias", True, default=True)
    c.only("swiglu_alpha", 1.702, default=1.702)
    c.only("tie_word_embeddings", False, default=False)
    c.ignore("initial_context_length", "experts_per_token")  # repeat other fields
    layers = c.layers("num_hidden_layers")
    c.only("num_hidden_layers", layers + layers % 2)
    in_turn = ["sliding_attention", "full_attention"] * (layers // 2)
    c.only("layer_types", in_turn, default=in_turn)
    plain = c.is_null(c.first_present("rope_parameters", "rope_scaling"))
    return gpt_oss(
        name,
        layers,
        c.whole(c.first_present("num_local_experts", "num_experts")),
        heads=c.whole("num_attention_heads"),
        kv_heads=c.whole("num_key_value_heads"),
        head_dim=c.whole("head_dim"),
        embed=c.whole("hidden_size"),
        ff=c.whole("intermediate_size"),
        top_k=c.whole("num_experts_per_tok"),
        window=c.whole("sliding_window", 128),
        limit=c.number("swiglu_limit", 7.0),
        vocab=c.whole("vocab_size"),
        balance=c.balancing("router_aux_loss_coef", 0.001),
        rope=STRETCHED if plain else rotation(c, 150_000.0),
        attention_dropout=c.rate("attention_dropout", 0.0),
    )
