"""Mamba-2 (Dao & Gu, arXiv:2405.21060): selective state spaces only, no attention."""

from math import inf

from megaloom.dsl import (
    Dim,
    Embed,
    Mamba2,
    Model,
    NextToken,
    RMSNorm,
    Unembed,
    ids,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.hf.architectures import Config, reads
from megaloom.dsl.hf.tensor_names import (
    JOIN,
    Names,
    Stored,
    columns,
    flat,
    rows,
)


def mamba2(
    name: str,
    layers: int,
    embed: int,
    *,
    head_dim: int = 64,
    state: int = 128,
    groups: int = 1,
    conv: int = 4,
    vocab: int = 50288,
    tied: bool = True,
) -> Model:
    """A Mamba-2 of any size; the inner width is twice embed."""
    v, d = Dim("vocab", vocab), Dim("embed", embed)
    wte = weight("wte", v, d)
    head = wte if tied else weight("head", v, d)
    heads = 2 * embed // head_dim
    mamba = Mamba2(heads=heads, head_dim=head_dim, state=state, groups=groups, norm_groups=groups, conv=conv)
    x = ids() >> Embed(wte) >> repeat(layers, residual(RMSNorm(), mamba))
    return model(name, x >> RMSNorm() >> Unembed(head) >> NextToken(), std=0.1)


def mamba2_130m() -> Model:
    return mamba2("mamba2-130m", 24, 768)


def mamba2_370m() -> Model:
    return mamba2("mamba2-370m", 48, 1024)


def mamba2_780m() -> Model:
    return mamba2("mamba2-780m", 48, 1536)


def mamba2_1_3b() -> Model:
    return mamba2("mamba2-1.3b", 48, 2048)


def mamba2_2_7b() -> Model:
    return mamba2("mamba2-2.7b", 64, 2560)


MIXED = ("mamba2.0.x", "mamba2.0.b", "mamba2.0.c")  # the channels of the convolution, in its order
MIXER = {
    "in_proj.weight": columns("mamba2.0.z", *MIXED, "mamba2.0.dt"),
    "conv1d.weight": Stored(tuple(f"{name}_conv" for name in MIXED), ((JOIN, ...), 1, "width")),
    "conv1d.bias": flat(*(f"{name}_conv_bias" for name in MIXED)),
    "A_log": flat("mamba2.0.a_log"),
    "D": flat("mamba2.0.skip"),
    "dt_bias": flat("mamba2.0.dt_shift"),
    "norm.weight": flat("mamba2.0.scale"),
    "out_proj.weight": rows("mamba2.0.o"),
}
WHOLE = {
    "backbone.embeddings.weight": columns("wte"),
    "backbone.norm_f.weight": flat("rms_norm.0.scale"),
    "lm_head.weight": columns("head"),
}
LAYER = {"norm.weight": flat("rms_norm.0.scale"), **{f"mixer.{name}": stored for name, stored in MIXER.items()}}

FLOAT32_MAX = 3.4028235e38  # steps are computed in float32


def steps(c: Config) -> None:
    """Raise UserError if a config limits the steps of the state space. Fields for initial values are ignored."""
    c.ignore("time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "time_step_init_scheme")
    limits = c.array("time_step_limit", [0.0, inf])
    if not (len(limits) == 2 and limits[0] == 0 and isinstance(limits[1], int | float) and limits[1] >= FLOAT32_MAX):
        raise c.unsupported("time_step_limit", f"supported: [0.0, x] with x ≥ {FLOAT32_MAX}, which limits nothing")
    c.ignore("chunk_size", "residual_in_fp32", "rescale_prenorm_residual")  # numerics, or initial values


COPIES = {"lm_head.weight": "backbone.embeddings.weight"}


@reads("Mamba2ForCausalLM", names=Names(WHOLE, {"backbone.layers.{layer}.": LAYER}, copies=COPIES), std=0.1)
def config(c: Config, name: str) -> Model:
    steps(c)
    embed, head_dim = c.whole("hidden_size"), c.whole("head_dim", 64)
    c.only("expand", 2, default=2)
    c.only("num_heads", 2 * embed // head_dim)
    c.only("hidden_act", "silu", default="silu")
    c.only("layer_norm_epsilon", 1e-5, default=1e-5)
    c.only("use_bias", False, default=False)
    c.only("use_conv_bias", True, default=True)
    c.only("rms_norm", True, default=True)
    c.only("norm_before_gate", False, True, default=False)  # Hugging Face ignores it: the gate comes first
    return mamba2(
        name,
        layers=c.layers("num_hidden_layers"),
        embed=embed,
        head_dim=head_dim,
        state=c.whole("state_size", 128),
        groups=c.whole("n_groups", 8),
        conv=c.whole("conv_kernel", 4),
        vocab=c.whole("vocab_size"),
        tied=c.flag("tie_word_embeddings", False),
    )
