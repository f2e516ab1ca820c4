"""Nemotron-4 (arXiv:2402.16819, arXiv:2406.11704): squared ReLU, RoPE on half of the channels, no biases."""

from megaloom.dsl import (
    MLP,
    Attention,
    Dim,
    Embed,
    LayerNorm,
    Model,
    NextToken,
    Rope,
    Unembed,
    ids,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.hf.architectures import Config, reads, rotation
from megaloom.dsl.hf.tensor_names import (
    Names,
    columns,
    flat,
    rows,
)

from .llama3 import ATTENTION

NORM = LayerNorm(plus_one=True)


def nemotron(
    name: str,
    layers: int,
    heads: int,
    kv_heads: int,
    embed: int,
    ff: int,
    *,
    vocab: int = 256000,
    head_dim: int | None = None,
    rope: Rope | None = None,
    attention_dropout: float = 0.0,
    std: float = 0.0134,
) -> Model:
    """A Nemotron-4 of any size. rope: the default rotates half of the channels of each head.

    std: of initial weights.
    """
    v, d = Dim("vocab", vocab), Dim("embed", embed)
    half = Rope(10_000, (head_dim or embed // heads) // 2)
    attention = Attention(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope=rope or half, dropout=attention_dropout
    )
    block = residual(NORM, attention) >> residual(NORM, MLP(ff, "relu2"))
    x = ids() >> Embed(weight("wte", v, d)) >> repeat(layers, block)
    return model(name, x >> NORM >> Unembed(weight("head", v, d)) >> NextToken(), std=std)


def nemotron4_15b() -> Model:
    return nemotron("nemotron4-15b", 32, 48, 8, 6144, 24576)


def nemotron4_340b() -> Model:
    return nemotron("nemotron4-340b", 96, 96, 8, 18432, 73728)


def minitron_8b() -> Model:
    """Nemotron-4 15B pruned to 8B (arXiv:2407.14679)."""
    return nemotron("minitron-8b", 32, 48, 8, 4096, 16384, head_dim=128, std=0.01)


NAMES = Names(
    {
        "model.embed_tokens.weight": columns("wte"),
        "model.norm.weight": flat("layer_norm.0.scale"),
        "model.norm.bias": flat("layer_norm.0.shift"),
        "lm_head.weight": columns("head"),
    },
    {
        "model.layers.{layer}.": ATTENTION
        | {
            "input_layernorm.weight": flat("layer_norm.0.scale"),
            "input_layernorm.bias": flat("layer_norm.0.shift"),
            "post_attention_layernorm.weight": flat("layer_norm.1.scale"),
            "post_attention_layernorm.bias": flat("layer_norm.1.shift"),
            "mlp.up_proj.weight": columns("mlp.0.up"),
            "mlp.down_proj.weight": rows("mlp.0.down"),
        }
    },
)


@reads("NemotronForCausalLM", names=NAMES, std=0.0134)
def config(c: Config, name: str) -> Model:
    c.only("hidden_act", "relu2", default="relu2")
    c.only("norm_eps", 1e-5, default=1e-5)
    c.only("attention_bias", False, default=False)
    c.only("mlp_bias", False, default=False)
    c.only("tie_word_embeddings", False, default=False)
    heads, embed = c.whole("num_attention_heads"), c.whole("hidden_size")
    head_dim = c.whole("head_dim", embed // heads)
    return nemotron(
        name,
        layers=c.layers("num_hidden_layers"),
        heads=heads,
        kv_heads=c.whole("num_key_value_heads", heads),
        embed=embed,
        ff=c.whole("intermediate_size"),
        vocab=c.whole("vocab_size"),
        head_dim=c.head_dim(embed, heads),
        rope=rotation(c, 10_000.0, head_dim=head_dim, part=0.5),
        attention_dropout=c.rate("attention_dropout", 0.0),
    )
