"""Small models of each family, for the tests that run them. 127 tokens do not divide by two: tables are padded."""

from attrs import frozen

from megaloom.dsl import (
    MLP,
    Attention,
    Dim,
    Embed,
    Layer,
    LayerNorm,
    Model,
    Positions,
    Unembed,
    Value,
    fn,
    ids,
    model,
    repeat,
    weight,
)
from megaloom.examples.gpt2 import gpt
from megaloom.examples.llama3 import llama
from megaloom.examples.mixtral import mixtral


def tiny_gpt() -> Model:
    """Tied embeddings, learned positions, biases."""
    return gpt("tiny-gpt", layers=4, heads=4, embed=64, vocab=127, seq=32)


def tiny_gpt_dropout() -> Model:
    return gpt("tiny-gpt-dropout", layers=4, heads=4, embed=64, vocab=127, seq=32, dropout=0.1)


def tiny_llama() -> Model:
    """Two key/value heads for four query heads, rotary positions, an own table for the logits."""
    return llama("tiny-llama", layers=4, heads=4, kv_heads=2, embed=64, ff=96, vocab=127)


def deep_llama() -> Model:
    return llama("deep-llama", layers=8, heads=4, kv_heads=2, embed=64, ff=96, vocab=127)


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
    return model("tiny-parallel", x >> LayerNorm() >> Unembed(wte))


def tiny_mixtral() -> Model:
    """Four experts with a balancing loss."""
    return mixtral("tiny-mixtral", layers=2, heads=4, kv_heads=2, embed=64, ff=96, experts=4, vocab=127)


def byte_llama() -> Model:
    """Knows all bytes, and a token more: what is trained on text."""
    return llama("byte-llama", layers=2, heads=4, kv_heads=2, embed=64, ff=96, vocab=257, tied=True)


def byte_gpt() -> Model:
    return gpt("byte-gpt", layers=2, heads=4, embed=64, vocab=257, seq=32)
