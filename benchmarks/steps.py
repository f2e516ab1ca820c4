"""Compare planned and measured steps and memory on the GPUs at hand: `python -m benchmarks.steps [DEVICES] [CASE ...]`.

Each case is planned, trained for a few steps on random tokens, and compared: the median step time, and the most that
torch allocated on any device. DEVICES is the number of GPUs, by default all. Models too large for one GPU keep the
widths of their layers and have fewer layers. Cases with small micro-batches show the time of the host, cases with
recompute the time of recomputation. `families` runs instead the models whose attention or scan a layer's body computes.
Names of models select the cases of all lists that have them, in this order: `1 mamba2_1b deepseek_v3`.
"""

from __future__ import annotations

import sys
from statistics import median
from typing import Any

import torch
from attrs import field, frozen

from benchmarks.gpu_models import reference
from benchmarks.timed_steps import timed_steps
from megaloom.dsl.catalog import find
from megaloom.dsl.errors import UserError
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

GiB = 2**30
STEPS, FIRST = 16, 6  # steps of a case, and the first ones, which compile kernels and are not counted


@frozen
class Case:
    """A model of the examples or of `gpu_models`, sequences per device, and fixed layout fields."""

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
    model, ref = find(reference(case.model))
    work = Workload(seq=case.seq, batch=case.batch * count, precision=precision)
    return plan(model, cluster(f"{count}x{name}"), work, ref=ref, fixed=case.fixed).best


def trained(it: Plan, steps: int) -> tuple[list[float], float, float, float]:
    """Return for each rank the seconds of every step, peak GiB allocated and reserved by torch, and other GiB."""
    took = list(timed_steps(it, steps))
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
