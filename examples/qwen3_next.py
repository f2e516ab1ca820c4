"""Qwen3-Next (Qwen team, 2025): three layers of Gated DeltaNet for each of gated attention, and 512 small experts."""

from itertools import groupby

from megaloom.dsl import (
    Attention,
    Dim,
    Embed,
    GatedDeltaNet,
    Layer,
    Model,
    MoE,
    NextToken,
    RMSNorm,
    Rope,
    SigmoidGated,
    SwiGLU,
    Unembed,
    ids,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.hf.architectures import Config, reads, rotation
from megaloom.dsl.hf.tensor_names import JOIN, GroupsOf, Stored, columns, flat, rows

from .llama3 import NORMS, SWIGLU, decoder
from .qwen3 import EXPERTS, dense_layers

LINEAR, FULL = "linear_attention", "full_attention"  # Hugging Face's words
EACH = 4  # layers in a pattern: three linear ones and a full one


def usual_kinds(layers: int, each: int = EACH) -> tuple[str, ...]:
    """Return the kind of each layer where every `each`th one has full attention."""
    return tuple(LINEAR if i % each < each - 1 else FULL for i in range(layers))


def qwen3_next(
    name: str,
    kinds: tuple[str, ...],
    embed: int,
    *,
    attention: Attention,
    delta_net: GatedDeltaNet,
    ff: Layer,
    dense: dict[int, Layer] | None = None,
    vocab: int = 151936,
    eps: float = 1e-6,
    tied: bool = False,
) -> Model:
    """A Qwen3-Next of any size. kinds: LINEAR or FULL for each layer. dense: layers by number in place of `ff`."""
    v, d = Dim("vocab", vocab), Dim("embed", embed)
    wte = weight("wte", v, d)
    norm, mixers = RMSNorm(eps, plus_one=True), {LINEAR: delta_net, FULL: attention}
    x = ids() >> Embed(wte)
    pairs = [(mixers[kind], (dense or {}).get(i, ff)) for i, kind in enumerate(kinds)]
    for (mixer, one), run in groupby(pairs):
        x = x >> repeat(len(list(run)), residual(norm, mixer) >> residual(norm, one))
    return model(name, x >> norm >> Unembed(wte if tied else weight("head", v, d)) >> NextToken())


def experts(ff: int, number: int, top_k: int, shared: int, *, balance: float = 0.001, normalize: bool = True) -> MoE:
    """Return a mixture of experts with a gated shared expert, balanced over the global batch."""
    return MoE(
        SwiGLU(ff),
        number,
        top_k,
        balance=balance,
        balance_over="batch",
        normalize=normalize,
        shared=SigmoidGated(SwiGLU(shared)) if shared else None,
    )


def qwen3_next_80b_a3b() -> Model:
    return qwen3_next(
        "qwen3-next-80b-a3b",
        usual_kinds(48),
        2048,
        attention=gated_attention(16, 2, 256, Rope(1e7, channels=64)),
        delta_net=GatedDeltaNet(heads=32, head_dim=128, groups=16, state=128),
        ff=experts(512, 512, 10, 512),
    )


def gated_attention(
    heads: int, kv_heads: int, head_dim: int, rope: float | Rope, *, eps: float = 1e-6, dropout: float = 0.0
) -> Attention:
    """Return attention with norms on queries and keys, whose output is gated."""
    norm = RMSNorm(eps, over="head_dim", plus_one=True)
    return Attention(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope=rope, qk_norm=norm, gated=True, dropout=dropout
    )


PER_GROUP = ((GroupsOf("groups", "heads"), JOIN, ...), "embed")  # each group of keys, with its heads of values
LAYER = {
    **NORMS,
    **EXPERTS,
    **SWIGLU,
    "self_attn.q_proj.weight": Stored(("attention.0.q", "attention.0.gate"), (("heads", JOIN, "head_dim"), "embed")),
    "self_attn.k_proj.weight": columns("attention.0.k"),
    "self_attn.v_proj.weight": columns("attention.0.v"),
    "self_attn.o_proj.weight": rows("attention.0.o"),
    **{f"self_attn.{n}_norm.weight": flat(f"attention.0.{n}_norm.scale") for n in "qk"},
    "linear_attn.in_proj_qkvz.weight": Stored(tuple(f"gated_delta_net.0.{n}" for n in "qkvz"), PER_GROUP),
    "linear_attn.in_proj_ba.weight": Stored(("gated_delta_net.0.beta", "gated_delta_net.0.dt"), PER_GROUP),
    "linear_attn.conv1d.weight": Stored(tuple(f"gated_delta_net.0.{n}_conv" for n in "qkv"), ((JOIN, ...), 1, "width")),
    "linear_attn.dt_bias": flat("gated_delta_net.0.dt_shift"),
    "linear_attn.A_log": flat("gated_delta_net.0.a_log"),
    "linear_attn.norm.weight": flat("gated_delta_net.0.scale"),
    "linear_attn.out_proj.weight": rows("gated_delta_net.0.o"),
    "mlp.shared_expert_gate.weight": Stored(("moe.0.shared.token_gate",), (1, "embed")),
    "mlp.shared_expert.gate_proj.weight": columns("moe.0.shared.gate"),
    "mlp.shared_expert.up_proj.weight": columns("moe.0.shared.up"),
    "mlp.shared_expert.down_proj.weight": rows("moe.0.shared.down"),
}


@reads("Qwen3NextForCausalLM", names=decoder(LAYER, unused=("mtp.",)))
def config(c: Config, name: str) -> Model:
    """Return the model. Published checkpoints have layers of multi-token prediction, which transformers leaves out."""
    c.only("hidden_act", "silu", default="silu")
    c.only("attention_bias", False, default=False)
    layers, eps = c.layers("num_hidden_layers"), c.number("rms_norm_eps", 1e-6)
    each = c.whole("full_attention_interval", EACH)
    kinds = tuple(c.array("layer_types", list(usual_kinds(layers, each))))
    if len(kinds) != layers or not set(kinds) <= {LINEAR, FULL}:
        raise c.unsupported("layer_types", f"supported: {LINEAR} or {FULL} for each of num_hidden_layers")
    return qwen3_next(
        name,
        kinds,
        c.whole("hidden_size"),
        attention=gated_attention(
            c.whole("num_attention_heads"),
            c.whole("num_key_value_heads"),
            c.whole("head_dim", 256),
            rotation(c, 10_000.0, head_dim=c.whole("head_dim", 256), part=0.25),
            eps=eps,
            dropout=c.rate("attention_dropout", 0.0),
        ),
        delta_net=GatedDeltaNet(
            heads=c.whole("linear_num_value_heads", 32),
            head_dim=c.whole("linear_value_head_dim", 128),
            groups=c.whole("linear_num_key_heads", 16),
            state=c.whole("linear_key_head_dim", 128),
            conv=c.whole("linear_conv_kernel_dim", 4),
            eps=eps,
        ),
        ff=experts(
            c.whole("moe_intermediate_size"),
            c.whole("num_experts"),
            c.whole("num_experts_per_tok"),
            c.whole("shared_expert_intermediate_size", 0),
            balance=c.balancing("router_aux_loss_coef", 0.001),
            normalize=c.flag("norm_topk_prob", True),
        ),
        dense=dense_layers(c),
        vocab=c.whole("vocab_size"),
        eps=eps,
        tied=c.flag("tie_word_embeddings", False),
    )
