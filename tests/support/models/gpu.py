"""Small models for GPUs: heads of at least 16 channels, so that FlexAttention computes what fused attention cannot."""

from collections.abc import Callable

from megaloom.dsl import MLA, MLP, Attention, GatedDeltaNet, Mamba2, Model, MoE, Rope, SwiGLU, packed
from megaloom.examples.bart import bart
from megaloom.examples.bert import bert
from megaloom.examples.bloom import bloom
from megaloom.examples.deepseek import deepseek, rotary
from megaloom.examples.gemma2 import gemma2
from megaloom.examples.gemma3 import gemma3
from megaloom.examples.gpt2 import gpt
from megaloom.examples.gpt_oss import gpt_oss
from megaloom.examples.llama3 import llama
from megaloom.examples.llava import clip, llava
from megaloom.examples.mamba2 import mamba2
from megaloom.examples.mistral import mistral
from megaloom.examples.mixtral import mixtral
from megaloom.examples.nemotron import nemotron
from megaloom.examples.nemotron_h import nemotron_h
from megaloom.examples.qwen2 import qwen2
from megaloom.examples.qwen3 import qwen3
from megaloom.examples.qwen3_next import FULL, LINEAR, experts, gated_attention, qwen3_next
from megaloom.examples.starcoder import starcoder
from megaloom.examples.t5 import t5
from megaloom.examples.vit import vit

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


def gpt2_wide() -> Model:
    return gpt("gpt2", 2, 4, 128, vocab=VOCAB, seq=SEQ, dropout=0.0, attention_dropout=0.0)


def starcoder_wide() -> Model:
    return starcoder("starcoder", 2, 4, 128, vocab=VOCAB, seq=SEQ)


def llama_wide() -> Model:
    return llama("llama", 2, 4, 2, 128, 192, vocab=VOCAB)


def mistral_wide() -> Model:
    return mistral("mistral", 2, 4, 2, 128, 192, vocab=VOCAB, rope=1e4, head_dim=32, window=64)


def qwen2_wide() -> Model:
    return qwen2("qwen2", 2, 4, 2, 128, 192, vocab=VOCAB, tied=True)


def qwen3_wide() -> Model:
    return qwen3("qwen3", 2, 4, 2, 128, SwiGLU(192), vocab=VOCAB, head_dim=32)


def nemotron_wide() -> Model:
    return nemotron("nemotron", 2, 4, 2, 128, 192, vocab=VOCAB, std=0.05)


def gemma3_wide() -> Model:
    return gemma3("gemma3", 6, 4, 2, 128, 192, head_dim=32, query_scale=32, window=64, vocab=VOCAB)


def mixtral_wide() -> Model:
    return mixtral("mixtral", 2, 4, 2, 128, 192, experts=4, vocab=VOCAB)


LATENT = MLA(heads=4, q_rank=64, kv_rank=32, nope=32, rope=16, v=32, positions=rotary())
GROUPS = {"balance": 0.01, "groups": 4, "top_groups": 2}
GROUPED = MoE(SwiGLU(64), 8, 3, shared=SwiGLU(96), normalize=False, scale=2.0, best=1, **GROUPS)
CORRECTED = MoE(SwiGLU(64), 8, 3, shared=SwiGLU(64), score="sigmoid", corrected=True, scale=2.5, **GROUPS)


def deepseek_v2_wide() -> Model:
    return deepseek("deepseek-v2", LATENT, 128, ff=192, moe=GROUPED, dense=1, sparse=1, vocab=VOCAB)


def deepseek_v3_wide() -> Model:
    return deepseek("deepseek-v3", LATENT, 128, ff=192, moe=CORRECTED, dense=1, sparse=1, vocab=VOCAB)


def deepseek_v3_mtp_wide() -> Model:
    sizes = {"ff": 192, "dense": 1, "sparse": 2, "vocab": VOCAB, "mtp_layers": 1}
    return deepseek("deepseek-v3-mtp", LATENT, 128, moe=CORRECTED, **sizes)


def nemotron_h_wide() -> Model:
    mamba = Mamba2(heads=8, head_dim=16, state=32, groups=2, norm_groups=2)
    attention = Attention(heads=4, kv_heads=2, head_dim=32)
    return nemotron_h("nemotron-h", "M-M*-", 128, mamba=mamba, attention=attention, mlp=MLP(192, "relu2"), vocab=VOCAB)


def bert_pre_norm_wide() -> Model:
    options = {"dropout": 0.0, "attention_dropout": 0.0, "pre_norm": True}
    return bert("bert-pre-norm", 2, 4, 128, 192, vocab=VOCAB, seq=SEQ, **options)


def vit_wide() -> Model:
    return vit("vit", 2, 4, 128, 192, patch=4, pixels=28, classes=11)


WIDE: dict[str, Callable[[], Model]] = {
    "gpt2": gpt2_wide,
    "starcoder": starcoder_wide,
    "bloom": bloom_wide,
    "llama": llama_wide,
    "mistral": mistral_wide,
    "qwen2": qwen2_wide,
    "qwen3": qwen3_wide,
    "qwen3-moe": qwen3_moe_wide,
    "nemotron": nemotron_wide,
    "gemma2": gemma2_wide,
    "gemma3": gemma3_wide,
    "mixtral": mixtral_wide,
    "gpt-oss": gpt_oss_wide,
    "deepseek-v2": deepseek_v2_wide,
    "deepseek-v3": deepseek_v3_wide,
    "deepseek-v3-mtp": deepseek_v3_mtp_wide,
    "mamba2": mamba2_wide,
    "nemotron-h": nemotron_h_wide,
    "qwen3-next": qwen3_next_wide,
    "bert": bert_wide,
    "bert-pre-norm": bert_pre_norm_wide,
    "vit": vit_wide,
    "t5": t5_wide,
    "bart": bart_wide,
    "llava": llava_wide,
}
"""The families of `tests.support.parity.families`."""
