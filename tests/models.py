"""Small models of each family, for the tests that run them. 127 tokens do not divide by two: tables are padded."""

from megaloom.dsl import Model
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


def tiny_mixtral() -> Model:
    """Four experts with a balancing loss."""
    return mixtral("tiny-mixtral", layers=2, heads=4, kv_heads=2, embed=64, ff=96, experts=4, vocab=127)


def byte_llama() -> Model:
    """Knows all bytes, and a token more: what is trained on text."""
    return llama("byte-llama", layers=2, heads=4, kv_heads=2, embed=64, ff=96, vocab=257, tied=True)


def byte_gpt() -> Model:
    return gpt("byte-gpt", layers=2, heads=4, embed=64, vocab=257, seq=32)
