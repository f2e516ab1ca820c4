"""Compare plans with the parameters that the runtime builds: `python benchmarks/built.py [SEARCHES [PLANS]]`.

For each of the best PLANS of a search, ten by default, every pipeline rank is built on megatron-core's process groups
and layers, over torch's fake backend and on the meta device. Each chunk must have exactly the planned parameters, and
weights and optimizer exactly the planned bytes. The rank on the other axes is drawn; for up to eight devices all are
built.
SEARCHES is the number of searches, drawn at random; by default all. The exit status is 1 if anything differs.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterable, Iterator
from time import process_time
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import torch.distributed as dist
from attrs import frozen
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from megaloom.dsl import Graph, graph
from megaloom.dsl.catalog import find
from megaloom.planner import Workload, cluster
from megaloom.planner.contract.plans import Plan, Stage
from megaloom.planner.cost.memory import state_bytes
from megaloom.planner.search.search import plan
from megaloom.runtime.megatron import device

device.prepare()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402

from megaloom.runtime.megatron.build_context import make_build_context  # noqa: E402
from megaloom.runtime.megatron.process_groups import create_process_groups  # noqa: E402
from megaloom.runtime.modules import model_chunk as modules  # noqa: E402

FEW = 8  # up to so many devices all are built
BEST = 10  # plans of each search
SEED = 76
# Model, cluster, sequence length, global batch, and fixed axes.
SEARCHES: tuple[tuple[str, str, int, int, dict[str, Any]], ...] = (
    ("gpt2", "8xA100", 1024, 64, {"pp": 2, "tp": 2}),
    ("gpt2-xl", "40xA100", 1024, 80, {"tp": 5}),
    ("gpt3-6-7b", "32xA100", 2048, 256, {"tp": 4}),
    ("gpt3-13b", "64xA100", 2048, 256, {"pp": 4}),
    ("gpt3-175b", "1024xH100", 2048, 1536, {"tp": 8, "pp": 16}),
    ("gpt3-175b", "768xA100", 2048, 1536, {"tp": 8, "pp": 12}),
    ("llama2-7b", "24xA100", 6144, 96, {"cp": 3}),
    ("llama2-70b", "128xH100", 4096, 512, {"tp": 4, "vpp": 2}),
    ("llama3-1b", "8xH100", 8192, 64, {"pp": 8}),
    ("llama3-8b", "64xH100", 8192, 256, {"cp": 2, "tp": 2}),
    ("llama3-8b", "32xH200", 32768, 32, {"cp": 8}),
    ("llama3-70b", "80xH100", 8192, 320, {"pp": 5, "tp": 8}),
    ("llama3-405b", "1024xH100", 8192, 512, {"tp": 8, "pp": 16}),
    ("mistral-7b", "16xH100", 4096, 128, {}),
    ("mistral-24b", "32xH100", 4096, 128, {"pp": 4}),
    ("qwen2-5-0-5b", "8xA100", 2048, 64, {"tp": 2}),
    ("qwen2-5-72b", "64xH200", 4096, 256, {"tp": 8}),
    ("qwen3-0-6b", "8xH100", 4096, 64, {"tp": 2}),
    ("qwen3-8b", "16xH100", 4096, 64, {"tp": 16}),
    ("qwen3-32b", "64xH100", 4096, 256, {"tp": 4, "pp": 2}),
    ("qwen3-30b-a3b", "32xH100", 4096, 128, {"ep": 8, "tp": 2}),
    ("qwen3-235b-a22b", "256xH100", 4096, 1024, {"ep": 32, "pp": 8}),
    ("mixtral-8x7b", "128xH100", 4096, 512, {"ep": 8, "pp": 4}),
    ("mixtral-8x7b", "32xH100", 4096, 128, {"ep": 2, "etp": 4, "tp": 4}),
    ("mixtral-8x22b", "256xH100", 4096, 512, {"ep": 8, "tp": 2, "etp": 2}),
    ("deepseek-v2-lite", "16xH100", 4096, 128, {"ep": 8}),
    ("deepseek-v2", "160xH100", 4096, 320, {"ep": 20, "pp": 4}),
    ("deepseek-v3", "1024xH100", 4096, 4096, {"ep": 64, "pp": 16}),
    ("deepseek-v3", "512xH200", 4096, 2048, {"ep": 32, "tp": 2}),
    ("gpt-oss-20b", "32xH100", 4096, 128, {"ep": 4, "tp": 2}),
    ("gpt-oss-120b", "64xH100", 4096, 256, {"ep": 16}),
    ("gpt-oss-20b", "32xH100", 4096, 64, {"ep": 2, "tp": 16}),
    ("gemma3-1b", "8xH100", 4096, 64, {"tp": 4}),
    ("bloom-7b", "24xA100", 2048, 192, {"pp": 3}),
    ("bloom-176b", "384xA100", 2048, 2048, {"tp": 4, "pp": 12}),
    ("starcoder-15b", "16xA100", 4096, 128, {"tp": 4}),
    ("gemma3-12b", "32xH100", 4096, 128, {"tp": 4}),
    ("minitron-8b", "16xH100", 4096, 128, {"tp": 2}),
    ("nemotron4-340b", "768xH100", 4096, 768, {"tp": 8, "pp": 12}),
    ("nemotron-h-8b", "32xH100", 4096, 128, {"tp": 4}),
    ("mamba2-2-7b", "16xA100", 2048, 128, {"pp": 2}),
)


@frozen
class Built:
    """Elements that one device holds: of each chunk, of dense weights and of experts."""

    chunks: tuple[int, ...]
    dense: int
    experts: int


def plans(count: int, name: str, gpus: str, seq: int, batch: int, fixed: dict[str, Any]) -> tuple[Plan, ...]:
    """Return the best `count` plans of a search."""
    model, ref = find(name)
    result = plan(model, cluster(gpus), Workload(seq=seq, batch=batch), ref=ref, fixed=fixed)
    return (result.best, *result.next(count - 1))


def differences(plan: Plan, source: random.Random) -> Iterator[str]:
    """Yield a line for each pipeline rank whose parameters differ from the plan."""
    x, precision, g = plan.layout, plan.workload.precision, graph(find(plan.model)[0])
    for device_rank in range(x.world) if x.world <= FEW else [source.randrange(x.world)]:
        for rank, elements in built(plan, g, device_rank).items():
            planned_nbytes, planned_params = plan.predicted.nbytes[rank], tuple(s.params for s in of_rank(plan, rank))
            state = state_bytes(elements.dense, elements.experts, x, precision)
            pairs = [
                (elements.chunks, planned_params),
                (state.weights, planned_nbytes["weights"]),
                (state.optimizer, planned_nbytes["optimizer"]),
            ]
            if wrong := [f"{ours}, planned {theirs}" for ours, theirs in pairs if ours != theirs]:
                yield f"{plan.model} {x} device {device_rank}, pipeline rank {rank}: {'; '.join(wrong)}"


def of_rank(plan: Plan, rank: int) -> list[Stage]:
    """Return the stages of a pipeline rank, in order of their chunks."""
    return sorted((s for s in plan.stages if s.rank == rank), key=lambda s: s.chunk)


def built(plan: Plan, g: Graph, device_rank: int) -> dict[int, Built]:
    """Return the elements that a device builds, by pipeline rank.

    One device builds the stages of every pipeline rank, with its own coordinates on the other axes.
    """
    x = plan.layout
    dist.init_process_group("fake", store=FakeStore(), rank=device_rank, world_size=x.world)
    try:
        groups = create_process_groups(x)
        model_parallel_cuda_manual_seed(0)
        context = make_build_context(g, x, plan.workload, groups)
        ranks = [groups.pp_rank] if x.world <= FEW else range(x.pp)
        return {rank: summed(modules.ModelChunk(g, s, context) for s in of_rank(plan, rank)) for rank in ranks}
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def summed(stages: Iterable[nn.Module]) -> Built:
    """Return the elements of these stages."""
    parameters = [list(stage.parameters()) for stage in stages]
    chunks = tuple(sum(p.numel() for p in stage) for stage in parameters)
    experts = sum(p.numel() for stage in parameters for p in stage if not getattr(p, "allreduce", True))
    return Built(chunks, sum(chunks) - experts, experts)


def weightless() -> None:
    """Let the current device be the meta device, on which nothing takes memory."""
    nowhere = torch.device("meta")
    torch.cuda.current_device = lambda: nowhere  # type: ignore[assignment]
    device.current = lambda: nowhere


def main(*counts: str) -> int:
    weightless()
    source = random.Random(SEED)
    some, best_count = [*map(int, counts), *(len(SEARCHES), BEST)[len(counts) :]]
    searches = source.sample(SEARCHES, some) if counts else SEARCHES
    count, wrong = 0, list[str]()
    for name, gpus, seq, batch, fixed in searches:
        start = process_time()
        best = plans(best_count, name, gpus, seq, batch, fixed)
        planned = process_time()
        lines = [line for p in best for line in differences(p, source)]
        count += len(best)
        wrong += lines
        axes = " ".join(f"{axis}{degree}" for axis, degree in fixed.items())
        seconds = f"planned in {planned - start:.1f} s, built in {process_time() - planned:.1f} s"
        print(f"{name:<18}{gpus:<12}{axes:<16}{len(best):>3} plans, {len(lines)} differences; {seconds}", flush=True)
    print(*wrong, f"{count} plans, {len(wrong)} differences", sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
