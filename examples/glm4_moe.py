"""GLM-4.5 (arXiv:2508.06471): many small experts beside grouped attention that rotates half of the channels."""

from megaloom.dsl import Attention, Model, MoE, RMSNorm, Rope, SwiGLU
from megaloom.dsl.hf.architectures import Config, reads, rotation
from megaloom.dsl.hf.tensor_names import flat

from .deepseek import EXPERTS, deepseek
from .llama3 import ATTENTION, NORMS, SWIGLU, decoder
from .qwen2 import BIASES

VOCAB = 151552
NORM = RMSNorm(1e-5)
BALANCE = 0.0001  # weight of the loss that balances experts over a sequence (arXiv:2508.06471, section 2.4)


def grouped(heads: int, kv_heads: int, head_dim: int, *, normed: bool) -> Attention:
    """Return the attention: biases of queries, keys and values, and norms of queries and keys where they are normed."""
    norm = RMSNorm(1e-5, over="head_dim") if normed else None
    half = Rope(1_000_000, head_dim // 2)
    return Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope=half, qkv_bias=True, qk_norm=norm)


def experts(ff: int, count: int, *, scale: float) -> MoE:
    """Return the mixture of experts: eight of them and a shared one for each token, chosen by corrected scores."""
    return MoE(SwiGLU(ff), count, 8, balance=BALANCE, shared=SwiGLU(ff), score="sigmoid", corrected=True, scale=scale)


def glm4_5(mtp_layers: int = 0) -> Model:
    """GLM-4.5, 355 billion parameters with multi-token prediction and without embeddings, as published."""
    moe, attention = experts(1536, 160, scale=2.5), grouped(96, 8, 128, normed=True)
    sizes = {"ff": 12288, "dense": 3, "sparse": 89, "vocab": VOCAB, "mtp_layers": mtp_layers}
    return deepseek("glm4.5", attention, 5120, moe=moe, norm=NORM, **sizes)


def glm4_5_air(mtp_layers: int = 0) -> Model:
    """GLM-4.5-Air, 106 billion parameters without embeddings."""
    moe, attention = experts(1408, 128, scale=1.0), grouped(96, 8, 128, normed=False)
    sizes = {"ff": 10944, "dense": 1, "sparse": 45, "vocab": VOCAB, "mtp_layers": mtp_layers}
    return deepseek("glm4.5-air", attention, 4096, moe=moe, norm=NORM, **sizes)


QK_NORMS = {f"self_attn.{n}_norm.weight": flat(f"attention.0.{n}_norm.scale") for n in "qk"}


@reads(
    "Glm4MoeForCausalLM",
    names=decoder(NORMS | ATTENTION | BIASES | QK_NORMS | SWIGLU | EXPERTS, unused=("model.layers.{beyond}.",)),
)
def config(c: Config, name: str) -> Model:
    """Return the model without its layers of multi-token prediction, as Hugging Face runs it."""
    c.ignore("num_nextn_predict_layers")
    c.only("hidden_act", "silu", default="silu")
    c.only("tie_word_embeddings", False, default=False)
    heads, eps = c.whole("num_attention_heads"), c.number("rms_norm_eps", 1e-5)
    head_dim = c.whole("head_dim", c.whole("hidden_size") // heads)
    ff = c.whole("moe_intermediate_size", 1408)
    attention = Attention(
        heads=heads,
        kv_heads=c.whole("num_key_value_heads", heads),
        head_dim=head_dim,
        rope=rotation(c, 10_000.0, head_dim=head_dim, part=0.5),
        qkv_bias=c.flag("attention_bias", False),
        qk_norm=RMSNorm(eps, over="head_dim") if c.flag("use_qk_norm", False) else None,
        dropout=c.rate("attention_dropout", 0.0),
    )
    moe = MoE(
        SwiGLU(ff),
        c.whole(c.first_present("n_routed_experts", "num_local_experts"), 128),
        c.whole("num_experts_per_tok", 8),
        balance=BALANCE,
        shared=SwiGLU(c.whole("n_shared_experts", 1) * ff),
        score="sigmoid",
        corrected=True,
        normalize=c.flag("norm_topk_prob", True),
        scale=c.number("routed_scaling_factor", 1.0),
        groups=c.whole("n_group", 1),
        top_groups=c.whole("topk_group", 1),
    )
    dense = min(c.whole("first_k_dense_replace", 1, least=0), c.layers("num_hidden_layers"))
    return deepseek(
        name,
        attention,
        c.whole("hidden_size"),
        ff=c.whole("intermediate_size"),
        moe=moe,
        dense=dense,
        sparse=c.layers("num_hidden_layers") - dense,
        vocab=c.whole("vocab_size"),
        norm=RMSNorm(eps),
    )
