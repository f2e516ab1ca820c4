"""GPT-2 (Radford et al., 2019) in its published sizes: learned positions, biases, tied embeddings."""

from megaloom.dsl import (
    MLP,
    Attention,
    Dim,
    Dropout,
    Embed,
    LayerNorm,
    Model,
    NextToken,
    Positions,
    Unembed,
    ids,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.hf.architectures import Config, reads
from megaloom.dsl.hf.tensor_names import (
    Names,
    columns,
    flat,
    rows,
)


def gpt(
    name: str,
    layers: int,
    heads: int,
    embed: int,
    *,
    vocab: int = 50257,
    seq: int = 1024,
    dropout: float = 0.0,
    attention_dropout: float | None = None,
    embed_dropout: float = 0.0,
) -> Model:
    """A GPT-2 of any size. attention_dropout: of the probabilities; None is `dropout`, that before each residual."""
    d = Dim("embed", embed)
    wte, wpe = weight("wte", Dim("vocab", vocab), d), weight("wpe", Dim("position", seq), d, std=0.01)
    drop = (Dropout(dropout),) if dropout else ()
    probabilities = dropout if attention_dropout is None else attention_dropout
    block = residual(LayerNorm(), Attention(heads=heads, bias=True, dropout=probabilities), *drop) >> residual(
        LayerNorm(), MLP(4 * embed, "gelu_tanh", bias=True), *drop
    )
    x = ids() >> Embed(wte) >> Positions(wpe)
    x = x >> Dropout(embed_dropout) if embed_dropout else x
    x = x >> repeat(layers, block) >> LayerNorm()
    return model(name, x >> Unembed(wte) >> NextToken())  # one weight used twice: tied


def gpt2() -> Model:
    return gpt("gpt2", layers=12, heads=12, embed=768)


def gpt2_medium() -> Model:
    return gpt("gpt2-medium", layers=24, heads=16, embed=1024)


def gpt2_large() -> Model:
    return gpt("gpt2-large", layers=36, heads=20, embed=1280)


def gpt2_xl() -> Model:
    return gpt("gpt2-xl", layers=48, heads=25, embed=1600)


# Conv1D, the linear layer of GPT-2's checkpoints, stores [in out]; torch.nn.Linear stores [out in].
NAMES = Names(
    {
        "transformer.wte.weight": columns("wte"),
        "transformer.wpe.weight": columns("wpe"),
        "transformer.ln_f.weight": flat("layer_norm.0.scale"),
        "transformer.ln_f.bias": flat("layer_norm.0.shift"),
    },
    {
        "transformer.h.{layer}.": {
            "ln_1.weight": flat("layer_norm.0.scale"),
            "ln_1.bias": flat("layer_norm.0.shift"),
            "attn.c_attn.weight": rows("attention.0.q", "attention.0.k", "attention.0.v"),
            "attn.c_attn.bias": flat("attention.0.q_bias", "attention.0.k_bias", "attention.0.v_bias"),
            "attn.c_proj.weight": columns("attention.0.o"),
            "attn.c_proj.bias": flat("attention.0.o_bias"),
            "ln_2.weight": flat("layer_norm.1.scale"),
            "ln_2.bias": flat("layer_norm.1.shift"),
            "mlp.c_fc.weight": rows("mlp.0.up"),
            "mlp.c_fc.bias": flat("mlp.0.up_bias"),
            "mlp.c_proj.weight": columns("mlp.0.down"),
            "mlp.c_proj.bias": flat("mlp.0.down_bias"),
        }
    },
    unused=("transformer.h.{layer}.attn.bias", "transformer.h.{layer}.attn.masked_bias"),  # causal masks
    copies={"lm_head.weight": "transformer.wte.weight"},
    older={name: f"transformer.{name}" for name in ("h.", "wte.", "wpe.", "ln_f.")},
)


@reads("GPT2LMHeadModel", names=NAMES)
def config(c: Config, name: str) -> Model:
    embed, seq = c.whole("n_embd"), c.whole("n_positions", 1024)
    c.only("n_inner", 4 * embed, None, default=None)
    c.only("n_ctx", seq, default=seq)
    c.only("activation_function", "gelu_new", default="gelu_new")
    c.only("layer_norm_epsilon", 1e-5, default=1e-5)
    c.only("scale_attn_weights", True, default=True)
    c.only("scale_attn_by_inverse_layer_idx", False, default=False)
    c.only("reorder_and_upcast_attn", False, True, default=False)  # numerics only
    c.only("tie_word_embeddings", True, default=True)
    return gpt(
        name,
        c.layers("n_layer"),
        c.whole("n_head"),
        embed,
        vocab=c.whole("vocab_size"),
        seq=seq,
        dropout=c.rate("resid_pdrop", 0.1),
        attention_dropout=c.rate("attn_pdrop", 0.1),
        embed_dropout=c.rate("embd_pdrop", 0.1),
    )
