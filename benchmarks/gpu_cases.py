"""Cases of `gpu_runs`: models with a fixed layout, which separate what a step, a micro-batch and an expert cost.

A third of the cases is held out: kept out of every fit, and reported apart. The SHA-256 of a case's name chooses it, so
it was chosen before any run.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from hashlib import sha256
from typing import Any

from attrs import field, frozen

from benchmarks.gpu_models import reference
from megaloom.dsl.catalog import find
from megaloom.dsl.files.json_form import fingerprint
from megaloom.dsl.graph import graph
from megaloom.planner.contract.capability import assumed_environment, needs_flex_attention
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plan_json import PLAN_VERSION
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Backend, Precision, Runtime, Workload
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.model.requirements import model_requirements
from megaloom.planner.partition.whole_blocks import with_cut_points_of
from megaloom.planner.search.pricing import price

HELD_OUT = 3  # one case of so many


@frozen(slots=False)
class Case:
    """A model, a workload and a layout. The name has all of them, so that no case changes under its name."""

    family: str
    model: str  # as `gpu_models.reference` takes it
    seq: int
    batch: int  # sequences of a step on all devices
    layout: Layout
    backend: Backend = Backend.TORCH
    precision: Precision = Precision.BF16
    runtime: Runtime = Runtime.MEGALOOM
    name: str = field(init=False)

    @name.default
    def _name(self) -> str:
        layout = str(self.layout).replace(" ", "-").replace(",", "")
        program = str(self.backend if self.runtime is Runtime.MEGALOOM else self.runtime)
        how = program if self.precision is Precision.BF16 else f"{program}-{self.precision}"
        return f"{self.model.replace(' ', '')}/{self.seq}x{self.batch}/{layout}/{how}"

    @property
    def gpus(self) -> int:
        """Return the number of devices."""
        return self.layout.world

    @property
    def microbatches(self) -> int:
        """Return the number of micro-batches of a step."""
        return self.layout.microbatches(self.batch)

    @cached_property
    def held_out(self) -> bool:
        """Return whether the case is kept out of every fit."""
        return self.digest % HELD_OUT == 0

    @property
    def digest(self) -> int:
        """Return the SHA-256 of the name, by which cases are chosen."""
        return int(sha256(self.name.encode()).hexdigest(), 16)


def planned(case: Case, device: str) -> Plan:
    """Return the plan of a case, priced by the planner of today, on one machine of devices of this name."""
    model, ref = find(reference(case.model))
    g, work = graph(model), Workload(seq=case.seq, batch=case.batch, precision=case.precision)
    machine = cluster(f"{case.gpus}x{device}")
    priced = price(with_cut_points_of(g, case.runtime), case.layout, machine, work, case.runtime)
    needs = model_requirements(g).experts, needs_flex_attention(g.nodes)
    return Plan(
        version=PLAN_VERSION,
        model=ref,
        fingerprint=fingerprint(model),
        cluster=machine,
        workload=work,
        layout=priced.layout,
        stages=priced.stages,
        predicted=priced.prediction,
        reasons=(),
        environment=assumed_environment(case.runtime, machine.device.name, *needs, case.precision),
        runtime=case.runtime,
    )


def _each(
    family: str,
    model: str,
    load: tuple[int, int],
    microbatches: tuple[int, ...],
    backends: tuple[Backend, ...] = (Backend.TORCH,),
    precision: Precision = Precision.BF16,
    **layout: Any,
) -> Iterator[Case]:
    """Yield a case for each number of micro-batches and each backend. load: sequence length and sequences of a step."""
    seq, batch = load
    for m in microbatches:
        x = Layout(micro_batch=batch // (m * layout.get("dp", 1)), **layout)
        yield from (Case(family, model, seq, batch, x, backend, precision) for backend in backends)


BOTH = (Backend.TORCH, Backend.TE)
NARROW: dict[str, Any] = {"backends": (Backend.TE,), "precision": Precision.FP8}
LLAMA_8B, SHORT = "llama_8b(layers=24)", (2048, 8)
COPIES: dict[str, Any] = {"dp": 2, "shard": "optimizer"}  # with the distributed optimizer
CASES = (
    # Kernels of the host, narrow models.
    *_each("GPT", "small", (1024, 8), (1, 8)),
    *_each("GPT-2", "gpt2", (1024, 8), (1, 8)),
    *_each("GPT-3", "gpt3-1-3b", (2048, 16), (2, 8)),
    # Dense models of two sizes and more, from one micro-batch to eight.
    *_each("Llama 1B", "llama3-1b", (2048, 8), (1, 2, 4, 8)),
    *_each("Llama 1B", "llama_1b3", (2048, 16), (4,)),
    *_each("Llama 8B", "llama_8b(layers=4, vocab=32000)", (8192, 4), (1, 2, 4)),
    *_each("Llama 70B", "llama_70b", (4096, 4), (1, 4)),
    *_each("BLOOM", "bloom_7b", (2048, 8), (1, 4)),
    # Few large experts, many small ones, some of each.
    *_each("Mixtral", "mixtral_8x7b", (4096, 8), (1, 2, 4, 8), BOTH),
    *_each("Mixtral", "mixtral_8x7b", (4096, 4), (4,), BOTH),
    *_each("Qwen3", "qwen3_30b", (4096, 8), (2, 4, 8), BOTH),
    *_each("DeepSeek-V3", "deepseek_v3", (4096, 4), (1, 4)),
    *_each("GPT-OSS", "gpt_oss_20b", (4096, 8), (2, 8)),
    # Windows and scans, which bodies compute.
    *_each("Mistral", "mistral_7b", (8192, 4), (2,)),
    *_each("Gemma 3", "gemma3_4b", (4096, 8), (4, 8)),
    *_each("Mamba-2", "mamba2_1b", (4096, 4), (1, 4)),
    # Products in fp8.
    *_each("Llama 8B", "llama_8b(layers=4, vocab=32000)", (8192, 4), (1, 4), **NARROW),
    *_each("Llama 70B", "llama_70b", (4096, 4), (4,), **NARROW),
    *_each("GPT-3", "gpt3-1-3b", (2048, 16), (2, 8), **NARROW),
    *_each("Llama 1B", "llama_1b3", (2048, 16), (4,), **NARROW),
    *_each("Llama 1B", "llama3-1b", (2048, 8), (1, 4, 8), **NARROW),
    *_each("GPT-2", "gpt2", (1024, 8), (1, 8), **NARROW),
    # Two GPUs: copies, sharded weights, tensor, pipeline, context and expert parallelism.
    *_each("Llama 1B", "llama3-1b", (4096, 16), (2,), **COPIES),
    *_each("Llama 1B", "llama3-1b", (4096, 16), (4,), pp=2, vpp=2),
    *_each("Llama 8B", "llama_8b(layers=8)", (8192, 16), (4,), **COPIES),
    *_each("Llama 8B", "llama_8b(layers=8)", (8192, 8), (8,), tp=2, sequence_parallel=True),
    *_each("Llama 8B", "llama_8b(layers=8)", (8192, 8), (8,), BOTH, cp=2, shard="optimizer"),
    *_each("Llama 8B", "llama_8b(layers=8)", (8192, 8), (8,), **NARROW, tp=2, sequence_parallel=True),
    *_each("Llama 8B", "llama_8b(layers=8)", (8192, 8), (8,), **NARROW, cp=2, shard="optimizer"),
    *_each("Llama 8B", LLAMA_8B, SHORT, (1, 2, 4), dp=2, shard="weights"),
    *_each("Llama 8B", LLAMA_8B, SHORT, (4,), dp=2, shard="gradients"),
    *_each("Llama 8B", "llama3-8b", SHORT, (1,), dp=2, shard="weights", recompute="full", recompute_layers=29),
    *_each("Mixtral", "mixtral_8x7b", (4096, 16), (2, 4), BOTH, **COPIES, ep=2),
    *_each("Mixtral", "mixtral_8x7b(layers=3)", (4096, 16), (1, 4), dp=2, ep=2, shard="weights"),
    *_each("Qwen3", "qwen3_30b", (4096, 32), (2,), BOTH, **COPIES, ep=2),
    *_each("Qwen3", "qwen3_30b", (4096, 32), (2,), cp=2, ep=2, shard="optimizer"),
)
"""At first those of one GPU, then those of two."""
