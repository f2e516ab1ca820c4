"""Compare planned and measured steps and memory on the GPUs at hand: `python -m benchmarks.steps [DEVICES] [CASE ...]`.

Each case is planned, trained for a few steps on random tokens, and compared: the median step time, and the most that
torch allocated on any device. DEVICES is the number of GPUs, by default all. Models too large for one GPU keep the
widths of their layers and have fewer layers. Cases with small micro-batches show the time of the host, cases with
recompute the time of recomputation. `families` runs instead the models whose attention or scan a layer's body computes.
Names of models select the cases of all lists that have them, in this order: `1 mamba2_1b deepseek_v3`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from attrs import field, frozen

from megaloom.dsl import Model, MoE, SwiGLU
from megaloom.dsl.catalog import find
from megaloom.dsl.errors import UserError
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
from megaloom.planner import (
    Plan,
    Precision,
    Workload,
    cluster,
    plan,
)
from megaloom.planner.report.units import peak_memory
from megaloom.runtime.launch import launcher
from megaloom.runtime.megatron import device
from megaloom.runtime.optimizer.recipe import Recipe
from megaloom.runtime.samples.samples import SampleMaker

GiB = 2**30
STEPS, FIRST = 16, 6  # steps of a case, and the first ones, which compile kernels and are not counted


def small() -> Model:
    """Return a GPT of eight narrow layers, whose kernels end before the host can launch the next ones."""
    return gpt("small", layers=8, heads=8, embed=512)


def llama_8b() -> Model:
    return llama("llama3-8b, 6 layers", layers=6, heads=32, kv_heads=8, embed=4096, ff=14336)


def llama_70b() -> Model:
    return llama("llama3-70b, 2 layers", layers=2, heads=64, kv_heads=8, embed=8192, ff=28672, vocab=32000)


def mixtral_8x7b() -> Model:
    return mixtral("mixtral-8x7b, 2 layers", layers=2, heads=32, kv_heads=8, embed=4096, ff=14336)


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


@frozen
class Case:
    """A model of the examples or of this file, sequences per device, and fixed layout fields."""

    model: str
    seq: int
    batch: int
    fixed: dict[str, Any] = field(factory=dict)


ONE = (
    Case("small", 1024, 64, {"micro_batch": 16}),
    Case("small", 1024, 8, {"micro_batch": 1}),
    Case("gpt2", 1024, 64),
    Case("gpt2", 1024, 8, {"micro_batch": 1}),
    Case("gpt3-1-3b", 2048, 16),
    Case("llama3-1b", 4096, 16),
    Case("llama3-1b", 4096, 4, {"micro_batch": 1}),
    Case("llama3-1b", 4096, 16, {"recompute": "full", "recompute_layers": 0}),
    Case("llama_8b", 8192, 4),
    Case("llama_8b", 32768, 1),
    Case("llama_70b", 4096, 4),
    Case("mixtral_8x7b", 4096, 8),
    Case("mixtral_8x7b", 4096, 8, {"micro_batch": 1}),
    Case("qwen3_30b", 4096, 8),
)
MANY = (
    Case("llama3-1b", 4096, 16),
    Case("llama3-1b", 4096, 16, {"overlaps": ()}),
    Case("llama3-1b", 4096, 16, {"tp": 2, "sequence_parallel": True}),
    Case("llama3-1b", 4096, 16, {"pp": 2}),
    Case("llama3-1b", 4096, 16, {"pp": 2, "vpp": 2}),
    Case("llama3-1b", 4096, 16, {"cp": 2}),
    Case("llama_8b", 8192, 4, {"tp": 2, "sequence_parallel": True}),
    Case("mixtral_8x7b", 4096, 8, {"ep": 2}),
    Case("mixtral_8x7b", 4096, 8, {"ep": 1}),
    Case("qwen3_30b", 4096, 8, {"ep": 2}),
)
FAMILIES = (
    Case("mistral_7b", 8192, 4),
    Case("gemma2_2b", 4096, 8),
    Case("gemma3_4b", 4096, 8),
    Case("gpt_oss_20b", 4096, 8),
    Case("bloom_7b", 2048, 8),
    Case("deepseek_v3", 4096, 4),
    Case("mamba2_1b", 4096, 4),
)


def planned(case: Case, count: int, name: str, precision: Precision) -> Plan:
    """Return the best plan of a case."""
    here = f"{Path(__file__).resolve()}:{case.model}"
    model, ref = find(here if case.model in globals() else case.model)
    work = Workload(seq=case.seq, batch=case.batch * count, precision=precision)
    return plan(model, cluster(f"{count}x{name}"), work, ref=ref, fixed=case.fixed).best


def trained(it: Plan, steps: int) -> tuple[list[float], float, float, float]:
    """Return for each rank the seconds of every step, peak GiB allocated and reserved by torch, and other GiB."""
    from megaloom.runtime.engine.engine import Engine

    model, _ = find(it.model)
    engine = Engine.build(it, model, Recipe(steps=steps))
    maker = SampleMaker.of(engine.graph, it.workload.seq)
    tokens = torch.randint(maker.ids, (maker.length,), generator=torch.Generator().manual_seed(1))
    took = []
    for _ in range(steps):
        begun = time.monotonic()
        engine.step(lambda i: maker.make(tokens, i, 1))
        took.append(time.monotonic() - begun)
    reserved, beside = 0, 0
    if device.gpu_count():
        reserved = torch.cuda.max_memory_reserved()
        free, total = torch.cuda.mem_get_info()
        beside = total - free - torch.cuda.memory_reserved()
    return took, device.peak_memory() / GiB, reserved / GiB, beside / GiB


HEAD = "model           seq GBS  layout                               s/step  planned     off" + (
    "     GiB planned     off reserved  beside planned"
)


def row(case: Case, plan: Plan, step: float, allocated: float, reserved: float, other: float) -> str:
    """Return a case as a line of text. Planned memory is without allocator and runtime, which torch does not count."""
    planned_seconds, planned_gib = plan.predicted.step_seconds, peak_memory(plan, "allocated") / GiB
    runtime = (peak_memory(plan, "device") - peak_memory(plan, "reserved")) / GiB
    return (
        f"{case.model:<14}{case.seq:>6}{plan.workload.batch:>4}  {plan.layout!s:<34}{step:>9.4f}{planned_seconds:>9.4f}"
        f"{planned_seconds / step - 1:>+8.1%}{allocated:>8.1f}{planned_gib:>8.1f}{planned_gib / allocated - 1:>+8.1%}"
        f"{reserved:>9.1f}{other:>8.2f}{runtime:>8.2f}"
    )


def selected(names: list[str], count: int) -> tuple[Case, ...]:
    """Return the cases of these names, in their order; `families` and no name stand for a list."""
    usual = ONE if count == 1 else MANY
    if names in ([], ["families"]):
        return FAMILIES if names else usual
    known = (*usual, *FAMILIES)
    if unknown := sorted(set(names) - {case.model for case in known}):
        raise SystemExit(f"no case {', '.join(unknown)}; there are {', '.join(dict.fromkeys(c.model for c in known))}")
    return tuple(case for name in names for case in known if case.model == name)


def main() -> None:
    kind = device.local_cluster().partition("x")[2]
    numbers = [int(argument) for argument in sys.argv[1:] if argument.isdigit()]
    count = numbers[0] if numbers else device.gpu_count() or 1
    cases = selected([argument for argument in sys.argv[1:] if not argument.isdigit()], count)
    precision = Precision.BF16 if device.gpu_count() else Precision.FP32
    print(f"{count}x{kind}, {precision}\n{HEAD}", flush=True)
    for case in cases:
        try:
            it = planned(case, count, kind, precision)
            ranks = launcher.run(trained, (it, STEPS), it.layout)
        except (UserError, launcher.RankError) as error:
            print(f"{case.model:<14}{str(error).splitlines()[-1]}", flush=True)
            continue
        step = median(ranks[0][0][FIRST:])
        print(row(case, it, step, *(max(rank[i] for rank in ranks) for i in (1, 2, 3))), flush=True)


if __name__ == "__main__":
    main()
