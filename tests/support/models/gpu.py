"""Small models for GPUs: heads of at least 16 channels, so that FlexAttention computes what fused attention cannot."""

from megaloom.dsl import MLP, GatedDeltaNet, Model, MoE, Rope, SwiGLU, packed
from megaloom.examples.bart import bart
from megaloom.examples.bert import bert
from megaloom.examples.bloom import bloom
from megaloom.examples.gemma2 import gemma2
from megaloom.examples.gpt_oss import gpt_oss
from megaloom.examples.llama3 import llama
from megaloom.examples.llava import clip, llava
from megaloom.examples.mamba2 import mamba2
from megaloom.examples.qwen3 import qwen3
from megaloom.examples.qwen3_next import FULL, LINEAR, experts, gated_attention, qwen3_next
from megaloom.examples.t5 import t5

VOCAB, SEQ = 1000, 256


def gpt_oss_wide() -> Model:
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": 64, "embed": 128, "ff": 192, "top_k": 2, "window": 64}
    return gpt_oss("gpt-oss", 2, 4, limit=0.5, vocab=VOCAB, balance=0.01, **sizes)


def qwen3_moe_wide() -> Model:
    return qwen3("qwen3-moe", 2, 4, 2, 128, MoE(SwiGLU(96), 8, 2, balance=0.01), vocab=VOCAB, head_dim=32)


def qwen3_next_wide() -> Model:
    return qwen3_next(
        "qwen3-next",
        (LINEAR, FULL),
        128,
        attention=gated_attention(4, 2, 32, Rope(10_000.0, channels=8)),
        delta_net=GatedDeltaNet(heads=4, head_dim=32, groups=2, state=32),
        ff=experts(96, 8, 2, 64, balance=0.01),
        vocab=VOCAB,
    )


def gemma2_wide() -> Model:
    return gemma2("gemma2", 2, 4, 2, 128, 192, head_dim=32, query_scale=32, window=64, vocab=VOCAB)


def packed_llama() -> Model:
    return packed(llama("packed-llama", 2, 4, 2, 128, 192, vocab=VOCAB))


def llava_wide() -> Model:
    return llava("llava", clip(2, 4, 128, 192, patch=8, pixels=32), 2, 4, 128, 192, vocab=VOCAB, token=VOCAB - 1)


def bloom_wide() -> Model:
    return bloom("bloom", 2, 4, 128, vocab=VOCAB)


def t5_wide() -> Model:
    return t5("t5", 2, 4, 128, MLP(192, "relu"), head_dim=32, vocab=VOCAB, buckets=8, distance=64)


def bart_wide() -> Model:
    return bart("bart", 2, 4, 128, 192, vocab=VOCAB, seq=SEQ)


def mamba2_wide() -> Model:
    return mamba2("mamba2", 3, 128, head_dim=16, state=32, groups=2, vocab=VOCAB)


def bert_wide() -> Model:
    return bert("bert", 2, 4, 128, 192, vocab=VOCAB, seq=SEQ, dropout=0.0, attention_dropout=0.0)
