"""Small models of each family, for the tests that run them. 127 tokens do not divide by two: tables are padded."""

from attrs import frozen

from megaloom.dsl import (
    MLA,
    MLP,
    Attention,
    CrossAttention,
    Dim,
    Dropout,
    Embed,
    Layer,
    LayerNorm,
    Model,
    MoE,
    NextToken,
    Positions,
    RMSNorm,
    SequenceToSequence,
    SwiGLU,
    Unembed,
    Value,
    fn,
    freeze,
    ids,
    lora,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.examples.bert import bert
from megaloom.examples.deepseek import deepseek, rotary
from megaloom.examples.gemma2 import gemma2
from megaloom.examples.gpt2 import gpt
from megaloom.examples.gpt_oss import gpt_oss
from megaloom.examples.llama3 import llama
from megaloom.examples.llava import clip, llava
from megaloom.examples.mixtral import mixtral
from megaloom.examples.qwen3 import qwen3
from megaloom.examples.t5 import t5
from megaloom.examples.vit import vit


def tiny_gpt() -> Model:
    """Tied embeddings, learned positions, biases."""
    return gpt("tiny-gpt", layers=2, heads=4, embed=64, vocab=127, seq=32)


def tiny_gpt_4() -> Model:
    """tiny_gpt with four layers, where two are too few for what a test measures."""
    return gpt("tiny-gpt-4", layers=4, heads=4, embed=64, vocab=127, seq=32)


def tiny_gpt_dropout() -> Model:
    return gpt("tiny-gpt-dropout", layers=2, heads=4, embed=64, vocab=127, seq=32, dropout=0.1)


def dropouts(*, experts: bool = True) -> Model:
    """Dropout of embeddings, of hidden states, inside an MLP, of experts' outputs, and of a window's probabilities."""
    wte, wpe = weight("wte", Dim("vocab", 127), Dim("embed", 64)), weight("wpe", Dim("position", 32), Dim("embed", 64))
    drop = Dropout(0.1)
    attention = Attention(heads=4, kv_heads=2, window=9, dropout=0.1, bias=True)
    dense = residual(LayerNorm(), attention, drop) >> residual(LayerNorm(), MLP(96, dropout=0.1, bias=True), drop)
    plain = residual(LayerNorm(), Attention(heads=4, kv_heads=2), drop)
    sparse = plain >> residual(LayerNorm(), MoE(SwiGLU(48), experts=4, top_k=2) if experts else SwiGLU(48), drop)
    x = ids() >> Embed(wte) >> Positions(wpe) >> drop >> repeat(2, dense, sparse)
    return model("dropouts", x >> LayerNorm() >> Unembed(wte) >> NextToken(), std=0.1)


def dense_dropouts() -> Model:
    return dropouts(experts=False)


def tiny_llama() -> Model:
    """Two key/value heads for four query heads, rotary positions, an own table for the logits."""
    return llama("tiny-llama", layers=2, heads=4, kv_heads=2, embed=64, ff=96, vocab=127)


def tiny_llama_4() -> Model:
    """tiny_llama with four layers, where two are too few for what a test measures."""
    return llama("tiny-llama-4", layers=4, heads=4, kv_heads=2, embed=64, ff=96, vocab=127)


def tiny_llama_lora() -> Model:
    """Adapters on all matrices but one; that of the values has fewer heads than some layouts have tp ranks."""
    return lora(tiny_llama(), 4, targets=("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))


def tiny_gpt_lora() -> Model:
    """One A for queries, keys and values, as GPT-2's c_attn has; the frozen table is shared."""
    return lora(tiny_gpt(), 4, targets=("c_attn", "c_proj"))


def tiny_experts_lora() -> Model:
    return lora(tiny_deepseek_v3(), 4, targets=("q_a_proj", "q_b_proj", "o_proj"))


def deep_llama() -> Model:
    return llama("deep-llama", layers=8, heads=4, kv_heads=2, embed=64, ff=96, vocab=127)


def frozen_llama() -> Model:
    """A Llama for a teacher, which is not trained."""
    return freeze(llama("frozen-llama", layers=4, heads=4, kv_heads=2, embed=48, ff=96, vocab=127))


@frozen
class Parallel(Layer):
    """Attention and feed-forward of the same hidden states, in one sum with them, as in GPT-J."""

    attention: Layer
    ff: Layer
    transparent = True

    def body(self, x: Value, /, **side: Value) -> Value:
        h = x >> LayerNorm()
        return fn("add", x, h >> self.attention, h >> self.ff)


def tiny_parallel() -> Model:
    """Sums of three, and tables that were declared columns first."""
    vocab, position, d = Dim("vocab", 127), Dim("position", 32), Dim("embed", 64)
    wte, wpe = weight("wte", d, vocab), weight("wpe", d, position)
    x = ids() >> Embed(wte) >> Positions(wpe) >> repeat(4, Parallel(Attention(heads=4), MLP(128)))
    return model("tiny-parallel", x >> LayerNorm() >> Unembed(wte) >> NextToken())


def tiny_mixtral() -> Model:
    """Four experts with a balancing loss."""
    return mixtral("tiny-mixtral", layers=2, heads=4, kv_heads=2, embed=64, ff=96, experts=4, vocab=127)


LATENT = MLA(heads=4, q_rank=24, kv_rank=16, nope=8, rope=4, v=8, positions=rotary())


def tiny_deepseek_v2() -> Model:
    """Softmax weights as they are, experts of the best two of four groups; a shared one."""
    moe = MoE(
        SwiGLU(32), 8, 4, balance=0.01, shared=SwiGLU(64), normalize=False, scale=2.0, groups=4, top_groups=2, best=1
    )
    return deepseek("tiny-deepseek-v2", LATENT, 64, ff=96, moe=moe, dense=1, sparse=1, vocab=127)


def tiny_deepseek_v3() -> Model:
    """Sigmoid scores, corrected to balance the load."""
    moe = MoE(
        SwiGLU(32),
        8,
        4,
        balance=0.01,
        shared=SwiGLU(32),
        score="sigmoid",
        corrected=True,
        scale=2.5,
        groups=4,
        top_groups=2,
    )
    return deepseek("tiny-deepseek-v3", LATENT, 64, ff=96, moe=moe, dense=1, sparse=1, vocab=127)


def tiny_qwen3() -> Model:
    moe = MoE(SwiGLU(48), 8, 2, balance=0.01)
    return qwen3("tiny-qwen3", 2, 4, 2, 64, moe, vocab=127, head_dim=16)


def tiny_gpt_oss() -> Model:
    """Return a model with attention windows and sinks, expert biases and clamps that take effect.

    The limit is 2.4 standard deviations of the clamped values: 1 % is above it, and few are near. A value nearer than
    its rounding is on either side of the limit under two correct layouts, and its gradient is there or 0.
    """
    return gpt_oss(
        "tiny-gpt-oss",
        2,
        4,
        heads=4,
        kv_heads=2,
        head_dim=16,
        embed=64,
        ff=96,
        top_k=2,
        window=8,
        limit=0.4,
        vocab=127,
        balance=0.01,
    )


def biased_experts() -> Model:
    """Experts with biases, which a module runs only without etp, in a model of one's own."""
    e, v = Dim("embed", 64), Dim("vocab", 257)
    table = weight("table", v, e)
    block = residual(LayerNorm(), Attention(heads=4, bias=True)) >> residual(LayerNorm(), MoE(MLP(48, bias=True), 4, 2))
    return model("biased-experts", ids() >> Embed(table) >> repeat(2, block) >> Unembed(table) >> NextToken())


def tiny_llama4() -> Model:
    """One expert by its sigmoid, and a shared one of another kind."""
    moe = MoE(SwiGLU(96), 4, 1, score="sigmoid", normalize=False, shared=MLP(64, "relu2"))
    return qwen3("tiny-llama4", 2, 4, 2, 64, moe, vocab=127, head_dim=16)


def byte_llama() -> Model:
    """Return a model of bytes and one more token, for training on text."""
    return llama("byte-llama", layers=2, heads=4, kv_heads=2, embed=64, ff=96, vocab=257, tied=True)


def byte_gpt() -> Model:
    return gpt("byte-gpt", layers=2, heads=4, embed=64, vocab=257, seq=32)


def golden_llama() -> Model:
    """The model of the golden checkpoint. Its declaration must not change."""
    return llama("golden-llama", layers=1, heads=2, kv_heads=2, embed=8, ff=12, vocab=63)


def golden_moe() -> Model:
    """The model of the golden checkpoint of version 2. Its declaration must not change."""
    e, v = Dim("embed", 8), Dim("vocab", 61)
    table = weight("table", v, e)
    attention = Attention(heads=4, kv_heads=2, head_dim=2, rope=10_000, qk_norm=RMSNorm(over="head_dim"), qkv_bias=True)
    experts = MoE(SwiGLU(6), 4, 2, balance=0.01, shared=SwiGLU(4), score="sigmoid", corrected=True)
    block = repeat(1, residual(RMSNorm(), attention) >> residual(LayerNorm(), experts))
    return model("golden-moe", ids() >> Embed(table) >> block >> RMSNorm() >> Unembed(table) >> NextToken())


def tiny_bert() -> Model:
    """Masked tokens, token types, norms after the layers; 130 ids, of which 129 is the mask's."""
    return bert("tiny-bert", 2, 4, 64, 96, vocab=131, seq=32)


def tiny_bert_pre_norm() -> Model:
    return bert("tiny-bert-pre-norm", 2, 4, 64, 96, vocab=131, seq=32, pre_norm=True)


def tiny_vit() -> Model:
    """A class of an image of 9 patches."""
    return vit("tiny-vit", 2, 4, 64, 96, patch=4, pixels=12, classes=11)


def tiny_gemma2() -> Model:
    """Caps on scores and on logits, windows, norms around the layers."""
    return gemma2("tiny-gemma2", layers=2, heads=4, kv_heads=2, embed=64, ff=96, head_dim=16, window=8, vocab=127)


def tiny_pair() -> Model:
    """An encoder of width 32, which reads 24 tokens, and a decoder of width 64. They share no weights."""
    wide, narrow = Dim("embed", 64), Dim("embed", 32)
    whole, causal, cross = Attention(heads=4, causal=False), Attention(heads=4), CrossAttention(heads=4)
    mlp = residual(LayerNorm(), MLP(96))
    memory = ids("source_tokens", Dim("source", 24)) >> Embed(weight("source", Dim("vocab", 300), narrow))
    memory = memory >> repeat(3, residual(LayerNorm(), whole) >> mlp) >> LayerNorm()
    decoder = residual(LayerNorm(), causal) >> residual(LayerNorm(), cross) >> mlp
    x = ids() >> Embed(weight("wte", Dim("vocab", 300), wide)) >> repeat(3, decoder).given(memory=memory)
    head = Unembed(weight("head", Dim("vocab", 300), wide))
    return model("tiny-pair", x >> LayerNorm() >> head >> SequenceToSequence())


def uneven_t5() -> Model:
    """Twice as many encoder as decoder layers: with two chunks a rank, both embeddings are on the first rank."""
    return t5("uneven-t5", 4, 4, 32, SwiGLU(48), head_dim=8, vocab=301, buckets=8, distance=16, decoder_layers=2)


def tiny_llava() -> Model:
    """An image encoder of width 32, a projector, and a decoder of width 64. An image has nine patches."""
    image = clip(3, 4, 32, 48, patch=4, pixels=12)
    return llava("tiny-llava", image, layers=4, heads=4, embed=64, ff=96, vocab=299, token=298)
