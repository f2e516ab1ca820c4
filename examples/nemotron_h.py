"""Nemotron-H (arXiv:2504.03624): Mamba-2 and feed-forward layers, with a few layers of attention without positions."""

from megaloom.dsl import (
    MLP,
    Attention,
    Dim,
    Embed,
    Mamba2,
    Model,
    NextToken,
    RMSNorm,
    Unembed,
    chain,
    ids,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.hf.architectures import Config, reads
from megaloom.dsl.hf.tensor_names import Names, columns, rows

from .mamba2 import LAYER, WHOLE, steps


def nemotron_h(
    name: str, pattern: str, embed: int, *, mamba: Mamba2, attention: Attention, mlp: MLP, vocab: int = 131072
) -> Model:
    """A Nemotron-H of any size. pattern: one letter per layer, M for Mamba-2, * for attention, - for feed-forward."""
    kinds = {"M": mamba, "*": attention, "-": mlp}
    v, d = Dim("vocab", vocab), Dim("embed", embed)
    layers = chain(*(repeat(1, residual(RMSNorm(), kinds[letter])) for letter in pattern))
    x = ids() >> Embed(weight("wte", v, d)) >> layers
    return model(name, x >> RMSNorm() >> Unembed(weight("head", v, d)) >> NextToken())


def nemotron_h_8b() -> Model:
    return nemotron_h(
        "nemotron-h-8b",
        "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        4096,
        mamba=Mamba2(heads=128, head_dim=64, state=128, groups=8, norm_groups=8),
        attention=Attention(heads=32, kv_heads=8, head_dim=128),
        mlp=MLP(21504, "relu2"),
    )


OTHERS = {
    **{f"mixer.{n}_proj.weight": columns(f"attention.0.{n}") for n in "qkv"},
    "mixer.o_proj.weight": rows("attention.0.o"),
    "mixer.up_proj.weight": columns("mlp.0.up"),
    "mixer.down_proj.weight": rows("mlp.0.down"),
}
LETTERS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-"}


@reads("NemotronHForCausalLM", names=Names(WHOLE, {"backbone.layers.{layer}.": LAYER | OTHERS}))
def config(c: Config, name: str) -> Model:
    """Return the model. Its steps are at least time_step_min, as Hugging Face runs it; NVIDIA's training has no limit.

    Source: transformers, modeling_nemotron_h.py: NemotronHMamba2Mixer.time_step_limit.
    """
    steps(c)
    shortest = c.number("time_step_min", 0.001)
    c.only("mlp_hidden_act", "relu2", default="relu2")
    c.only("mamba_hidden_act", "silu", default="silu")
    c.only("use_conv_bias", True, default=True)
    for bias in ("attention_bias", "mamba_proj_bias", "mlp_bias", "use_bias"):
        c.only(bias, False, default=False)
    for eps in ("layer_norm_epsilon", "rms_norm_eps"):
        c.only(eps, 1e-5, default=1e-5)
    c.only("sliding_window", default=None)
    c.only("tie_word_embeddings", False, default=False)
    groups, head_dim = c.whole("n_groups", 8), c.whole(c.first_present("head_dim", "attention_head_dim"), 128)
    c.only("attention_head_dim", head_dim, default=head_dim)
    return nemotron_h(
        name,
        _pattern(c),
        c.whole("hidden_size"),
        mamba=Mamba2(
            heads=c.whole("mamba_num_heads", 128),
            head_dim=c.whole("mamba_head_dim", 64),
            state=c.whole("ssm_state_size", 128),
            groups=groups,
            conv=c.whole("conv_kernel", 4),
            norm_groups=groups,
            dt=(shortest, None) if shortest else None,
        ),
        attention=Attention(
            heads=c.whole("num_attention_heads"),
            kv_heads=c.whole("num_key_value_heads", 8),
            head_dim=head_dim,
            dropout=c.rate("attention_dropout", 0.0),
        ),
        mlp=MLP(c.whole("intermediate_size"), "relu2"),
        vocab=c.whole("vocab_size"),
    )


def _pattern(c: Config) -> str:
    """Return one letter per layer, from any of the three fields. Fields for experts and MTP have no effect here."""
    c.ignore(*(name for name in c.fields if name.startswith(("moe_", "mtp_"))))
    c.ignore("expand", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "routed_scaling_factor")
    c.ignore("n_group", "topk_group", "norm_topk_prob", "num_nextn_predict_layers")
    field = c.first_present("hybrid_override_pattern", "layers_block_type", "layer_types")
    if field == "hybrid_override_pattern":
        pattern = c.text(field)
    else:
        pattern = "".join(LETTERS.get(kind, "?") for kind in c.array(field))
    if not set(pattern) <= set(LETTERS.values()):
        raise c.unsupported(
            field, f"its layers can be {', '.join(sorted(set(LETTERS.values())))}, or {', '.join(LETTERS)}"
        )
    c.only("num_hidden_layers", len(pattern), default=len(pattern))
    return pattern
