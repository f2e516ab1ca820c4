"""DeepSeek-V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437), and Moonshot AI's models of this shape.

They have latent attention, many small experts and shared ones.
"""

from attrs import evolve

from megaloom.dsl import (
    MLA,
    Dim,
    Embed,
    Join,
    Layer,
    Model,
    MoE,
    NextToken,
    RMSNorm,
    Rope,
    Shift,
    SwiGLU,
    Unembed,
    YarnScaling,
    apply,
    ids,
    labels,
    model,
    repeat,
    residual,
    weight,
    weighted_sum,
)
from megaloom.dsl.hf.architectures import Config, reads, rotation
from megaloom.dsl.hf.tensor_names import (
    JOIN,
    Stored,
    columns,
    flat,
    rows,
)
from megaloom.dsl.ops.rope import yarn_magnitude

from .llama3 import NORMS, SWIGLU, decoder

NORM = RMSNorm(1e-6)
MTP_WEIGHT = 0.3  # of the loss of multi-token prediction, in the first 10 T tokens (arXiv:2412.19437, section 4.2)


def rotary(factor: float = 40, original: int = 4096, theta: float = 10_000) -> Rope:
    """Return rotary positions scaled by YaRN. YaRN's attention factor is applied to the scores (see `scale`)."""
    return Rope(theta, interleaved=True, scaling=YarnScaling(factor=factor, original=original, attention_factor=1.0))


def scale(channels: int, factor: float = 40, mscale: float = 1.0) -> float:
    """Return the factor on the scores: channels^-0.5 times the square of YaRN's attention factor."""
    return float(channels**-0.5 * yarn_magnitude(factor, mscale) ** 2)


def deepseek(
    name: str,
    attention: Layer,
    embed: int,
    *,
    ff: int,
    moe: MoE,
    dense: int,
    sparse: int,
    vocab: int,
    mtp_layers: int = 0,
    norm: RMSNorm = NORM,
) -> Model:
    """Return a DeepSeek of any size, or a model of its shape.

    It has `dense` layers, `sparse` layers, then `mtp_layers` layers of multi-token prediction.
    """
    v, d = Dim("vocab", vocab), Dim("embed", embed)
    wte, head = weight("wte", v, d), weight("head", v, d)
    mix = residual(norm, attention)
    block = mix >> residual(norm, moe)
    tokens = ids()
    x = tokens >> Embed(wte)
    x = x >> repeat(dense, mix, residual(norm, SwiGLU(ff))) if dense else x
    x = x >> repeat(sparse, block) if sparse else x
    y = labels()
    losses = [(1.0, x >> norm >> Unembed(head) >> NextToken(y))]
    for i in range(mtp_layers):
        tokens = apply(Shift("seq", 1), tokens) if i else tokens
        x = x >> repeat(1, Join(wte, norm).given(tokens=tokens), block)
        losses.append((MTP_WEIGHT / mtp_layers, x >> norm >> Unembed(head) >> NextToken(y, offset=i + 1)))
    return model(name, weighted_sum(*losses) if mtp_layers else losses[0][1])


def latent(heads: int, q_rank: int | None, mscale: float) -> MLA:
    """Return the latent attention of the published models, which differ in heads, query rank and mscale."""
    s = scale(128 + 64, mscale=mscale)
    return MLA(heads=heads, q_rank=q_rank, kv_rank=512, nope=128, rope=64, v=128, positions=rotary(), scale=s)


def deepseek_v2_lite() -> Model:
    """DeepSeek-V2-Lite, 15.7 billion parameters."""
    moe = MoE(SwiGLU(1408), 64, 6, balance=0.001, shared=SwiGLU(2 * 1408), normalize=False)
    attention = latent(16, None, 0.707)
    return deepseek("deepseek-v2-lite", attention, 2048, ff=10944, moe=moe, dense=1, sparse=26, vocab=102400)


def deepseek_v2() -> Model:
    """DeepSeek-V2, 236 billion parameters: experts come from the three of eight groups with the best single expert."""
    moe = MoE(
        SwiGLU(1536),
        160,
        6,
        balance=0.003,
        shared=SwiGLU(2 * 1536),
        normalize=False,
        scale=16.0,
        groups=8,
        top_groups=3,
        best=1,
    )
    attention = latent(128, 1536, 0.707)
    return deepseek("deepseek-v2", attention, 5120, ff=12288, moe=moe, dense=1, sparse=59, vocab=102400)


def deepseek_v3(mtp_layers: int = 0) -> Model:
    """DeepSeek-V3, 671 billion parameters, without multi-token prediction."""
    moe = MoE(
        SwiGLU(2048),
        256,
        8,
        balance=0.0001,
        shared=SwiGLU(2048),
        score="sigmoid",
        corrected=True,
        scale=2.5,
        groups=8,
        top_groups=4,
    )
    name, attention = "deepseek-v3-mtp" if mtp_layers else "deepseek-v3", latent(128, 1536, 1.0)
    return deepseek(name, attention, 7168, ff=18432, moe=moe, dense=3, sparse=58, vocab=129280, mtp_layers=mtp_layers)


def deepseek_v3_mtp() -> Model:
    """DeepSeek-V3 with multi-token prediction, as it was trained: one more layer predicts the token after the next."""
    return deepseek_v3(mtp_layers=1)


def moonlight_16b_a3b() -> Model:
    """Moonlight 16B A3B (arXiv:2502.16982). All norms have one epsilon here, as frameworks on Megatron-core run it."""
    moe = MoE(SwiGLU(1408), 64, 6, balance=0.001, shared=SwiGLU(2 * 1408), score="sigmoid", corrected=True, scale=2.446)
    plain = Rope(50_000, interleaved=True)
    attention = MLA(heads=16, q_rank=None, kv_rank=512, nope=128, rope=64, v=128, positions=plain, eps=1e-5)
    sizes = {"ff": 11264, "dense": 1, "sparse": 26, "vocab": 163840}
    return deepseek("moonlight-16b-a3b", attention, 2048, moe=moe, norm=RMSNorm(1e-5), **sizes)


def kimi_k2() -> Model:
    """Kimi K2 (arXiv:2507.20534), 1.03 trillion parameters: DeepSeek-V3 with more experts and half of the heads."""
    moe = MoE(SwiGLU(2048), 384, 8, balance=0.0001, shared=SwiGLU(2048), score="sigmoid", corrected=True, scale=2.827)
    positions, s = rotary(factor=32, theta=50_000), scale(128 + 64, factor=32)
    attention = MLA(heads=64, q_rank=1536, kv_rank=512, nope=128, rope=64, v=128, positions=positions, scale=s)
    return deepseek("kimi-k2", attention, 7168, ff=18432, moe=moe, dense=1, sparse=60, vocab=163840)


LATENT = {
    # With q_lora_rank, queries are projected from their low-rank vector, else from the hidden state.
    "self_attn.q_proj.weight": Stored(("mla.0.q_nope", "mla.0.q_rope"), (("heads", JOIN, "head_dim"), "embed")),
    "self_attn.q_a_proj.weight": columns("mla.0.q_down"),
    "self_attn.q_a_layernorm.weight": flat("mla.0.q_norm.scale"),
    "self_attn.q_b_proj.weight": Stored(("mla.0.q_nope", "mla.0.q_rope"), (("heads", JOIN, "head_dim"), "q_rank")),
    "self_attn.kv_a_proj_with_mqa.weight": columns("mla.0.kv_down", "mla.0.k_rope"),
    "self_attn.kv_a_layernorm.weight": flat("mla.0.kv_norm.scale"),
    "self_attn.kv_b_proj.weight": Stored(("mla.0.k_nope", "mla.0.v"), (("kv_heads", JOIN, "head_dim"), "kv_rank")),
    "self_attn.o_proj.weight": rows("mla.0.o"),
}
EXPERTS = {
    "mlp.gate.weight": columns("moe.0.router"),
    "mlp.gate.e_score_correction_bias": flat("moe.0.correction"),
    "mlp.experts.{experts}.gate_proj.weight": columns("moe.0.experts.gate"),
    "mlp.experts.{experts}.up_proj.weight": columns("moe.0.experts.up"),
    "mlp.experts.{experts}.down_proj.weight": rows("moe.0.experts.down"),
    "mlp.shared_experts.gate_proj.weight": columns("moe.0.shared.gate"),
    "mlp.shared_experts.up_proj.weight": columns("moe.0.shared.up"),
    "mlp.shared_experts.down_proj.weight": rows("moe.0.shared.down"),
}
NAMES = decoder(NORMS | LATENT | SWIGLU | EXPERTS, unused=("model.layers.{beyond}.",))


@reads("DeepseekV2ForCausalLM", names=NAMES)
def v2_config(c: Config, name: str) -> Model:
    grouped = c.choice("topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy")
    c.only("scoring_func", "softmax", default="softmax")
    c.only("norm_topk_prob", False, default=False)
    moe = _moe(c, grouped, balance=c.balancing("aux_loss_alpha", 0.001), scale=c.number("routed_scaling_factor", 1.0))
    return _read(c, name, evolve(moe, normalize=False, best=1 if grouped else moe.best))


@reads("DeepseekV3ForCausalLM", names=NAMES)
def v3_config(c: Config, name: str) -> Model:
    """Return the model without its layers of multi-token prediction, as Hugging Face runs it."""
    c.ignore("num_nextn_predict_layers", "num_mtp_layers")
    c.only("topk_method", "noaux_tc", default="noaux_tc")
    c.only("scoring_func", "sigmoid", default="sigmoid")
    c.only("rope_interleave", True, default=True)
    moe = _moe(c, True, balance=c.balancing("aux_loss_alpha", 0.0001), scale=c.number("routed_scaling_factor", 2.5))
    return _read(c, name, evolve(moe, score="sigmoid", corrected=True, normalize=c.flag("norm_topk_prob", True)))


def _moe(c: Config, grouped: bool, *, balance: float, scale: float) -> MoE:
    c.only("moe_layer_freq", 1, default=1)
    ff = c.whole("moe_intermediate_size")
    groups, top_groups = c.whole("n_group", 1), c.whole("topk_group", 1)
    return MoE(
        SwiGLU(ff),
        c.whole(c.first_present("n_routed_experts", "num_local_experts", "num_experts")),
        c.whole("num_experts_per_tok"),
        balance=balance,
        balance_over="sequence" if c.flag("seq_aux", True) else "batch",
        shared=SwiGLU(c.whole("n_shared_experts") * ff),
        scale=scale,
        groups=groups if grouped else 1,
        top_groups=top_groups if grouped else 1,
    )


def _read(c: Config, name: str, moe: MoE) -> Model:
    c.only("hidden_act", "silu", default="silu")
    c.only("rms_norm_eps", 1e-6, default=1e-6)
    c.only("attention_bias", False, default=False)
    c.only("attention_dropout", 0.0, default=0.0)
    c.only("mlp_bias", False, default=False)
    c.only("tie_word_embeddings", False, default=False)
    heads, nope, rope = c.whole("num_attention_heads"), c.whole("qk_nope_head_dim"), c.whole("qk_rope_head_dim")
    c.only("num_key_value_heads", heads, default=heads)
    c.ignore("head_dim", "qk_head_dim")  # follow from the others
    positions = evolve(rotation(c, 10_000.0), interleaved=True)
    stretched = c.inner(c.first_present("rope_parameters", "rope_scaling"), {})
    mscale, factor = stretched.number("mscale_all_dim", 0.0), stretched.number("factor", 1.0)
    attention = MLA(
        heads=heads,
        q_rank=None if c.is_null("q_lora_rank") else c.whole("q_lora_rank", 1536),
        kv_rank=c.whole("kv_lora_rank", 512),
        nope=nope,
        rope=rope,
        v=c.whole("v_head_dim"),
        positions=positions,
        scale=scale(nope + rope, factor, mscale),
    )
    dense = min(c.whole("first_k_dense_replace", 0, least=0), c.layers("num_hidden_layers"))
    return deepseek(
        name,
        attention,
        c.whole("hidden_size"),
        ff=c.whole("intermediate_size"),
        moe=moe,
        dense=dense,
        sparse=c.layers("num_hidden_layers") - dense,
        vocab=c.whole("vocab_size"),
    )
