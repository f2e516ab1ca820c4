"""Mixtral (Jiang et al., arXiv:2401.04088): Mistral's attention, and eight experts, two per token."""

from megaloom.dsl import (
    Attention,
    Dim,
    Embed,
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
from megaloom.dsl.hf.tensor_names import columns, rows

from .llama3 import ATTENTION, NORMS, decoder


def mixtral(
    name: str,
    layers: int,
    heads: int,
    kv_heads: int,
    embed: int,
    ff: int,
    experts: int = 8,
    top_k: int = 2,
    *,
    vocab: int = 32000,
    head_dim: int | None = None,
    rope: float | Rope = 1e6,
    balance: float = 0.02,
    eps: float = 1e-5,
    tied: bool = False,
    attention_dropout: float = 0.0,
) -> Model:
    """A Mixtral of any size."""
    v, d = Dim("vocab", vocab), Dim("embed", embed)
    attention = Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope=rope, dropout=attention_dropout)
    wte = weight("wte", v, d)
    head = wte if tied else weight("head", v, d)
    moe = MoE(SwiGLU(ff), experts=experts, top_k=top_k, balance=balance)
    block = residual(RMSNorm(eps), attention) >> residual(RMSNorm(eps), moe)
    return model(name, ids() >> Embed(wte) >> repeat(layers, block) >> RMSNorm(eps) >> Unembed(head) >> NextToken())


def mixtral_8x7b() -> Model:
    return mixtral("mixtral-8x7b", layers=32, heads=32, kv_heads=8, embed=4096, ff=14336)


def mixtral_8x22b() -> Model:
    """Mixtral 8x22B v0.1 (the vocabulary of the instructed model is 32,768)."""
    return mixtral("mixtral-8x22b", layers=56, heads=48, kv_heads=8, embed=6144, ff=16384, balance=0.001)


EXPERTS = {
    "block_sparse_moe.gate.weight": columns("moe.0.router"),
    "block_sparse_moe.experts.{experts}.w1.weight": columns("moe.0.experts.gate"),
    "block_sparse_moe.experts.{experts}.w3.weight": columns("moe.0.experts.up"),
    "block_sparse_moe.experts.{experts}.w2.weight": rows("moe.0.experts.down"),
}


@reads("MixtralForCausalLM", names=decoder(NORMS | ATTENTION | EXPERTS))
def config(c: Config, name: str) -> Model:
    c.only("hidden_act", "silu", default="silu")
    c.only("sliding_window", default=None)
    heads, embed = c.whole("num_attention_heads"), c.whole("hidden_size")
    return mixtral(
        name,
        layers=c.layers("num_hidden_layers"),
        heads=heads,
        kv_heads=c.whole("num_key_value_heads", 8),
        embed=embed,
        ff=c.whole("intermediate_size"),
        experts=c.whole("num_local_experts", 8),
        top_k=c.whole("num_experts_per_tok", 2),
        vocab=c.whole("vocab_size"),
        head_dim=c.head_dim(embed, heads),
        balance=c.balancing("router_aux_loss_coef", 0.001),
        rope=rope(c, 1e6),
        eps=c.number("rms_norm_eps", 1e-5),
        tied=c.flag("tie_word_embeddings", False),
        attention_dropout=c.rate("attention_dropout", 0.0),
    )
