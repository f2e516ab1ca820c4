"""Memory that torch holds while our modules compute a micro-batch, tensor by tensor, against the prediction.

On the CPU, where a LayerNorm and an MLP are the same kernels as on a GPU (an RMSNorm and a SwiGLU are one kernel there
alone), in fp32.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from attrs import evolve
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megaloom.dsl import (
    MLA,
    MLP,
    Attention,
    ClampedGLU,
    Dim,
    Embed,
    GeGLU,
    Layer,
    LayerNorm,
    Mamba2,
    Model,
    MoE,
    NextToken,
    Rope,
    Unembed,
    YarnScaling,
    graph,
    ids,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.sharding_table import padded_vocabulary
from megaloom.examples.gpt2 import gpt
from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Stage
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.search.pricing import price
from megaloom.runtime.launch import launcher
from tests.support.limits import LIMIT

SEQ, BATCH, VOCAB = 256, 4, 64
YARN = YarnScaling(factor=4.0, original=16)
WORK = Workload(seq=SEQ, batch=BATCH, precision=Precision.FP32)


def lm(attention: Attention, ff: Layer) -> Model:
    v, d = Dim("vocab", VOCAB), Dim("embed", 128)
    block = residual(LayerNorm(), attention) >> residual(LayerNorm(), ff)
    x = ids() >> Embed(weight("wte", v, d)) >> repeat(4, block)
    return model("lm", x >> LayerNorm() >> Unembed(weight("head", v, d)) >> NextToken())


MODELS = {
    "tied": gpt("tied", layers=4, heads=4, embed=128, vocab=VOCAB, seq=SEQ),
    "rotary": lm(Attention(heads=8, kv_heads=2, rope=10_000), MLP(512, "gelu_tanh")),
    "relu": lm(Attention(heads=4), MLP(512, "relu")),
    "gated": lm(Attention(heads=4), GeGLU(256)),
    "sparse": lm(Attention(heads=4), MoE(MLP(256, "gelu_tanh"), experts=4, top_k=2)),
    "sinks": lm(Attention(heads=4, kv_heads=2, window=32, sink=True, rope=1e4, bias=True), MLP(512, "gelu_tanh")),
    "capped": lm(Attention(heads=4, kv_heads=2, window=64, softcap=50.0, rope=1e4), MLP(512, "gelu_tanh")),
    "windowed": lm(Attention(heads=4, kv_heads=2, window=64, rope=1e4), MLP(512, "gelu_tanh")),
    "alibi": lm(Attention(heads=4, alibi=True, bias=True), MLP(512, "gelu_tanh")),
    "stretched": lm(Attention(heads=4, rope=Rope(1e4, scaling=YARN)), MLP(512, "gelu_tanh")),
    "latent": lm(
        MLA(heads=4, q_rank=64, kv_rank=32, nope=16, rope=16, v=24, positions=Rope(1e4)), MLP(512, "gelu_tanh")
    ),
    "scans": lm(Mamba2(heads=8, head_dim=32, state=16, groups=2), MLP(512, "gelu_tanh")),
    "clamped": lm(Attention(heads=4), MoE(ClampedGLU(128), experts=4, top_k=2, bias=True)),
}
CASES = [
    ("tied", Recompute.NONE),
    ("tied", Recompute.FULL),
    ("rotary", Recompute.NONE),
    ("relu", Recompute.NONE),
    ("gated", Recompute.NONE),
    ("sparse", Recompute.NONE),
    ("sparse", Recompute.FULL),
    ("clamped", Recompute.NONE),
    ("sinks", Recompute.NONE),
    ("sinks", Recompute.SELECTIVE),
    ("capped", Recompute.NONE),
    ("windowed", Recompute.NONE),
    ("alibi", Recompute.NONE),
    ("stretched", Recompute.NONE),
    ("stretched", Recompute.SELECTIVE),
    ("latent", Recompute.NONE),
    ("scans", Recompute.NONE),
]
# Channels of the RMSNorms of a body. On CPUs each is several kernels, which save the normalised tensor too.
NORMS = {"latent": 64 + 32, "scans": 8 * 32}
LAYERS = 4


class Held(TorchDispatchMode):
    """The bytes of all tensors that were made since and are alive, now and at most, but for those that are known."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known, self.alive = known, set[int]()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self._made(t.untyped_storage())
        return out

    def _made(self, storage: Any) -> None:
        key, n = storage._cdata, storage.nbytes()
        if key not in self.alive and storage.data_ptr() not in self.known:
            self.alive.add(key)
            self.now += n
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, key, n)

    def _gone(self, key: int, n: int) -> None:
        self.alive.discard(key)
        self.now -= n


def saved(forward: Callable[[], object], known: set[int]) -> Iterator[int]:
    """Return the bytes of each saved tensor once, without those that are known."""
    saved_nbytes: dict[int, Any] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            saved_nbytes[storage.data_ptr()] = storage  # alive, so that no other takes its place
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        forward()
    return (storage.nbytes() for storage in saved_nbytes.values())


def measured() -> dict[tuple[str, str], tuple[int, int]]:
    """Of each case what is kept for the backward pass, and the most that is held within both."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megaloom.runtime.megatron.build_context import make_build_context
    from megaloom.runtime.megatron.process_groups import create_process_groups
    from megaloom.runtime.modules.model_chunk import ModelChunk

    first, result = create_process_groups(Layout(micro_batch=BATCH)), {}
    model_parallel_cuda_manual_seed(0)
    for name, recompute in CASES:
        g, layout = graph(MODELS[name]), Layout(micro_batch=BATCH, recompute=recompute)
        whole = Stage(rank=0, chunk=0, start=0, stop=len(g.nodes), params=0, forward_seconds=0.0, backward_seconds=0.0)
        stage = ModelChunk(g, whole, make_build_context(g, layout, WORK, evolve(first, layout=layout)))
        for p in stage.parameters():
            torch.nn.init.normal_(p, std=0.02)
            p.grad = torch.zeros_like(p)
        tokens = torch.randint(0, VOCAB, (BATCH, SEQ))
        known = {t.untyped_storage().data_ptr() for p in stage.parameters() for t in (p, p.grad)}
        saved_nbytes = sum(saved(partial(stage, tokens=tokens, labels=tokens), known))
        with Held(known) as tracker:
            next(iter(stage(tokens=tokens, labels=tokens).values())).sum().backward()
        result[name, str(recompute)] = saved_nbytes, tracker.most
    return result


@pytest.fixture(scope="module")
def measurements() -> dict[tuple[str, str], tuple[int, int]]:
    return launcher.run(measured, (), 1, timeout=LIMIT)[0]


@pytest.mark.parametrize(("name", "recompute"), CASES, ids=str)
def test_what_is_held(name: str, recompute: Recompute, measurements: dict[tuple[str, str], tuple[int, int]]) -> None:
    layout = Layout(micro_batch=BATCH, recompute=recompute)
    predicted = price(graph(MODELS[name]), layout, cluster("1xCPU"), WORK).prediction.nbytes[0]
    saved_nbytes, most = measurements[name, str(recompute)]
    vocab = padded_vocabulary(VOCAB, layout.split)
    loss = 4 * BATCH * SEQ * vocab  # what the loss keeps of each logit, which is freed before the backward's peak
    on_gpus = saved_nbytes - 4 * BATCH * SEQ * LAYERS * NORMS.get(name, 0)
    assert on_gpus == pytest.approx(predicted["activations"] + loss, rel=0.012)
    passing = sum(predicted[what] for what in ("activations", "workspace", "logits"))
    assert (
        0.84 * passing < most < 1.01 * passing
    )  # a backward is given room for the gradients of two of the largest tensors
