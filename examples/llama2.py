"""Llama 2 (Touvron et al., arXiv:2307.09288): Llama 3's layers on a smaller vocabulary and shorter sequences."""

from megaloom.dsl import Model

from .llama3 import llama


def llama2_7b() -> Model:
    return llama("llama2-7b", layers=32, heads=32, kv_heads=32, embed=4096, ff=11008, vocab=32000, rope=10_000)


def llama2_13b() -> Model:
    return llama("llama2-13b", layers=40, heads=40, kv_heads=40, embed=5120, ff=13824, vocab=32000, rope=10_000)


def llama2_70b() -> Model:
    return llama("llama2-70b", layers=80, heads=64, kv_heads=8, embed=8192, ff=28672, vocab=32000, rope=10_000)
