"""The families of `examples/` at tiny sizes, for drawn parity tests: unequal heads, groups and numbers of layers.

127 tokens do not divide by two: vocabularies are padded. `untrainable` decides which of them the runtime trains.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from megaloom.dsl import MLA, MLP, Attention, GatedDeltaNet, Graph, Mamba2, Model, MoE, Rope, SwiGLU, graph
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
from megaloom.planner.rules.capabilities import untrainable

VOCAB, SEQ = 127, 32
LATENT = MLA(heads=6, q_rank=24, kv_rank=16, nope=8, rope=4, v=12, positions=rotary())


@frozen
class Family:
    """One family at a tiny size."""

    make: Callable[[float], Model]  # of a rate of dropout, which families without dropout ignore
    falls_below: float  # the loss after 30 steps on one repeated batch, in nats
    has_dropout: bool = False

    def graph(self, dropout: float = 0.0) -> Graph:
        """Return the graph of the model."""
        return graph(self.make(dropout))


def _deepseek(name: str, moe: MoE, mtp_layers: int = 0) -> Model:
    return deepseek(name, LATENT, 48, ff=80, moe=moe, dense=1, sparse=2, vocab=VOCAB, mtp_layers=mtp_layers)


GROUPED = MoE(
    SwiGLU(24), 8, 3, balance=0.01, shared=SwiGLU(40), normalize=False, scale=2.0, groups=4, top_groups=2, best=1
)
CORRECTED = MoE(
    SwiGLU(24),
    8,
    3,
    balance=0.01,
    shared=SwiGLU(24),
    score="sigmoid",
    corrected=True,
    scale=2.5,
    groups=4,
    top_groups=2,
)

FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        lambda p: gpt("gpt2", 5, 4, 48, vocab=VOCAB, seq=SEQ, dropout=p, attention_dropout=0.0), 2.0, has_dropout=True
    ),
    "starcoder": Family(
        lambda p: starcoder("starcoder", 3, 6, 48, vocab=VOCAB, seq=SEQ, dropout=p), 1.5, has_dropout=True
    ),
    "bloom": Family(lambda p: bloom("bloom", 3, 4, 48, vocab=VOCAB, dropout=p), 1.2, has_dropout=True),
    "llama": Family(lambda p: llama("llama", 5, 6, 2, 48, 80, vocab=VOCAB), 1.2),
    "mistral": Family(lambda p: mistral("mistral", 3, 4, 2, 48, 80, vocab=VOCAB, rope=1e4, head_dim=16, window=9), 0.8),
    "qwen2": Family(lambda p: qwen2("qwen2", 4, 6, 2, 48, 80, vocab=VOCAB, tied=True), 1.4),
    "qwen3": Family(lambda p: qwen3("qwen3", 3, 4, 2, 48, SwiGLU(80), vocab=VOCAB, head_dim=16), 0.8),
    "qwen3-moe": Family(
        lambda p: qwen3("qwen3-moe", 3, 4, 2, 48, MoE(SwiGLU(40), 8, 2, balance=0.01), vocab=VOCAB, head_dim=16), 0.8
    ),
    "nemotron": Family(lambda p: nemotron("nemotron", 4, 6, 2, 48, 80, vocab=VOCAB, std=0.05), 0.8),
    "gemma2": Family(
        lambda p: gemma2("gemma2", 3, 4, 2, 48, 80, head_dim=16, query_scale=16, window=9, vocab=VOCAB), 2.0
    ),
    "gemma3": Family(
        lambda p: gemma3("gemma3", 7, 4, 2, 48, 80, head_dim=16, query_scale=16, window=9, vocab=VOCAB), 2.2
    ),
    "mixtral": Family(lambda p: mixtral("mixtral", 3, 6, 2, 48, 80, experts=4, vocab=VOCAB), 0.8),
    "gpt-oss": Family(
        lambda p: gpt_oss(
            "gpt-oss",
            3,
            4,
            heads=6,
            kv_heads=2,
            head_dim=16,
            embed=48,
            ff=80,
            top_k=2,
            window=9,
            limit=0.5,
            vocab=VOCAB,
            balance=0.01,
        ),
        0.8,
    ),
    "deepseek-v2": Family(lambda p: _deepseek("deepseek-v2", GROUPED), 0.8),
    "deepseek-v3": Family(lambda p: _deepseek("deepseek-v3", CORRECTED), 0.8),
    "deepseek-v3-mtp": Family(lambda p: _deepseek("deepseek-v3-mtp", CORRECTED, mtp_layers=1), 0.8),
    "mamba2": Family(lambda p: mamba2("mamba2", 5, 32, head_dim=8, state=12, groups=2, vocab=VOCAB), 1.2),
    "nemotron-h": Family(
        lambda p: nemotron_h(
            "nemotron-h",
            "M-M*-M*",
            48,
            mamba=Mamba2(heads=6, head_dim=8, state=12, groups=2, norm_groups=2),
            attention=Attention(heads=6, kv_heads=2, head_dim=8),
            mlp=MLP(80, "relu2"),
            vocab=VOCAB,
        ),
        0.8,
    ),
    "qwen3-next": Family(
        lambda p: qwen3_next(
            "qwen3-next",
            (LINEAR, FULL, LINEAR),
            48,
            attention=gated_attention(6, 2, 16, Rope(10_000.0, channels=4), dropout=p),
            delta_net=GatedDeltaNet(heads=6, head_dim=8, groups=2, state=12),
            ff=experts(40, 8, 2, 24, balance=0.01),
            vocab=VOCAB,
        ),
        0.8,
    ),
    "bert": Family(
        lambda p: bert("bert", 3, 4, 48, 80, vocab=131, seq=SEQ, dropout=p, attention_dropout=0.0),
        4.3,
        has_dropout=True,
    ),
    "bert-pre-norm": Family(
        lambda p: bert(
            "bert-pre-norm", 4, 6, 48, 80, vocab=131, seq=SEQ, dropout=p, attention_dropout=0.0, pre_norm=True
        ),
        4.3,
        has_dropout=True,
    ),
    "vit": Family(lambda p: vit("vit", 3, 4, 48, 80, patch=4, pixels=12, classes=11, dropout=p), 1.0, has_dropout=True),
    "t5": Family(lambda p: t5("t5", 3, 6, 48, MLP(80, "relu"), head_dim=8, vocab=300, buckets=8, distance=16), 4.5),
    "bart": Family(lambda p: bart("bart", 3, 4, 48, 80, vocab=300, seq=SEQ), 3.5),
    "llava": Family(
        lambda p: llava("llava", clip(2, 4, 48, 80, patch=4, pixels=8), 3, 6, 48, 80, vocab=VOCAB, token=126), 1.0
    ),
}


def trained_families() -> list[str]:
    """Return the families that the runtime trains."""
    return [name for name, family in FAMILIES.items() if untrainable(family.graph()) is None]
