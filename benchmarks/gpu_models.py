"""Models of the runs on our own GPUs: the widths of published models, and as few layers as fit one GPU."""

from __future__ import annotations

from pathlib import Path

from megaloom.dsl import Model, MoE, SwiGLU
from megaloom.examples.bloom import bloom
from megaloom.examples.deepseek import deepseek, latent
from megaloom.examples.gemma2 import gemma2
from megaloom.examples.gemma3 import gemma3
from megaloom.examples.gpt2 import gpt
from megaloom.examples.gpt_oss import gpt_oss
from megaloom.examples.llama3 import llama
from megaloom.examples.mamba2 import mamba2
from megaloom.examples.mistral import mistral
from megaloom.examples.mixtral import mixtral
from megaloom.examples.qwen3 import qwen3


def small() -> Model:
    """Return a GPT of eight narrow layers, whose kernels end before the host can launch the next ones."""
    return gpt("small", layers=8, heads=8, embed=512)


def llama_300m() -> Model:
    """Return a Llama of 300 M parameters that reads bytes, to train in fp8 and in bf16."""
    return llama("llama-300m", layers=24, heads=16, kv_heads=16, embed=1024, ff=2816, vocab=256)


def llama_1b3() -> Model:
    return llama("llama-1.3b", layers=24, heads=16, kv_heads=16, embed=2048, ff=5632, vocab=51200)


def llama_8b(layers: int = 6, vocab: int = 128256) -> Model:
    return llama(f"llama3-8b, {layers} layers", layers, heads=32, kv_heads=8, embed=4096, ff=14336, vocab=vocab)


def llama_70b() -> Model:
    return llama("llama3-70b, 2 layers", layers=2, heads=64, kv_heads=8, embed=8192, ff=28672, vocab=32000)


def mixtral_8x7b(layers: int = 2) -> Model:
    return mixtral(f"mixtral-8x7b, {layers} layers", layers, heads=32, kv_heads=8, embed=4096, ff=14336)


def qwen3_30b() -> Model:
    return qwen3("qwen3-30b-a3b, 4 layers", 4, 32, 4, 2048, MoE(SwiGLU(768), 128, 8, balance=0.001))


def gpt_oss_20b() -> Model:
    return gpt_oss("gpt-oss-20b, 2 layers", 2, 32)


def gemma2_2b() -> Model:
    return gemma2("gemma2-2b, 8 layers", 8, 8, 4, 2304, 9216)


def gemma3_4b() -> Model:
    return gemma3("gemma3-4b, 12 layers", 12, 8, 4, 2560, 10240)


def mistral_7b() -> Model:
    return mistral("mistral-7b, 6 layers", 6, 32, 8, 4096, 14336, vocab=32000, rope=1e4, window=4096)


def bloom_7b() -> Model:
    return bloom("bloom-7b1, 4 layers", 4, 32, 4096)


def deepseek_v3() -> Model:
    """Return one dense and one sparse layer of DeepSeek-V3, with 32 of its 256 experts."""
    moe = MoE(SwiGLU(2048), 32, 8, balance=0.0001, shared=SwiGLU(2048), score="sigmoid", corrected=True, scale=2.5)
    attention = latent(128, 1536, 1.0)
    return deepseek("deepseek-v3, 2 layers", attention, 7168, ff=18432, moe=moe, dense=1, sparse=1, vocab=32000)


def mamba2_1b() -> Model:
    return mamba2("mamba2-1.3b, 24 layers", 24, 2048)


def reference(name: str) -> str:
    """Return the reference by which `find` knows a model of this file, with arguments or not, or of the examples."""
    return f"{Path(__file__).resolve()}:{name}" if name.partition("(")[0] in globals() else name
