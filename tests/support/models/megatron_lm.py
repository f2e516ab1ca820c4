"""Small models of the families that Megatron-LM trains: GPT-2, its own BERT and T5, and a decoder with experts."""

from megaloom.dsl import (
    MLP,
    Attention,
    CrossAttention,
    Dim,
    Embed,
    LayerNorm,
    Model,
    MoE,
    NextToken,
    Positions,
    RMSNorm,
    SequenceToSequence,
    SwiGLU,
    Unembed,
    chain,
    ids,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.examples.bert import bert

NORM = LayerNorm(1e-5)
LAYERS, HEADS, EMBED, FF, VOCAB, SEQ = 4, 4, 32, 48, 64, 16


def megatron_gpt() -> Model:
    """Return a GPT-2: learned positions, biases, a tied table."""
    d = Dim("embed", EMBED)
    wte, wpe = weight("wte", Dim("vocab", VOCAB), d), weight("wpe", Dim("position", SEQ), d)
    block = residual(NORM, Attention(heads=HEADS, bias=True)) >> residual(NORM, MLP(FF, bias=True))
    x = ids() >> Embed(wte) >> Positions(wpe) >> repeat(LAYERS, block) >> NORM
    return model("megatron-gpt", x >> Unembed(wte) >> NextToken())


def megatron_bert() -> Model:
    """Return a BERT with norms before its layers."""
    return bert("megatron-bert", LAYERS, HEADS, EMBED, FF, vocab=VOCAB, seq=SEQ, pre_norm=True, norm=NORM)


def megatron_t5() -> Model:
    """Return a T5 with learned positions; encoder and decoder share all embeddings."""
    d = Dim("embed", EMBED)
    wte, wpe = weight("wte", Dim("vocab", VOCAB), d), weight("wpe", Dim("position", SEQ), d)
    embedded, mlp = chain(Embed(wte), Positions(wpe)), residual(NORM, MLP(FF, bias=True))
    encoder = residual(NORM, Attention(heads=HEADS, causal=False, bias=True)) >> mlp
    cross = residual(NORM, CrossAttention(heads=HEADS, bias=True))
    decoder = residual(NORM, Attention(heads=HEADS, bias=True)) >> cross >> mlp
    memory = ids("source_tokens", Dim("source")) >> embedded >> repeat(LAYERS, encoder) >> NORM
    x = ids() >> embedded >> repeat(LAYERS, decoder).given(memory=memory) >> NORM
    return model("megatron-t5", x >> Unembed(wte, bias=True) >> SequenceToSequence())


def megatron_experts(moe: MoE, *, dense: int = 0) -> Model:
    """Return a decoder whose layers after the first `dense` have experts."""
    wte, norm = weight("wte", Dim("vocab", VOCAB), Dim("embed", EMBED)), RMSNorm(1e-6)
    attention = residual(norm, Attention(heads=HEADS, kv_heads=2, rope=1e4))
    first = (repeat(dense, attention >> residual(norm, SwiGLU(FF))),) if dense else ()
    x = ids() >> chain(Embed(wte), *first) >> repeat(LAYERS - dense, attention >> residual(norm, moe))
    head = weight("head", Dim("vocab", VOCAB), Dim("embed", EMBED))
    return model("megatron-experts", x >> norm >> Unembed(head) >> NextToken())


MODELS = {"gpt": megatron_gpt, "bert": megatron_bert, "t5": megatron_t5}
