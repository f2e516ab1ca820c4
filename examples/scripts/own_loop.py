"""A training loop of your own: a declared model, a plan, and an engine on each rank.

`python -m megaloom.examples.scripts.own_loop` starts two ranks on this machine; `torchrun --nproc-per-node 2 -m
megaloom.examples.scripts.own_loop` uses those of torchrun.
"""

from pathlib import Path

import torch

from megaloom.dsl.catalog import find
from megaloom.planner import cluster, plan
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.runtime import Recipe, shard
from megaloom.runtime.launch import launcher
from megaloom.runtime.launch.rendezvous import started_by_launcher

RECIPE = Recipe(steps=20, lr=1e-2, warmup=2, schedule="wsd")


def counting(plan: Plan, step: int, dp_rank: int) -> dict[str, torch.Tensor]:
    """Return the sequences of one data-parallel rank for one step, [batch / dp, seq]: they count in threes."""
    rows = plan.workload.batch // plan.layout.dp
    first = torch.arange(rows)[:, None] + 7 * step + 31 * dp_rank
    text = (first + 3 * torch.arange(plan.workload.seq + 1)) % 256
    return {"tokens": text[:, :-1], "labels": text[:, 1:]}


def train(plan: Plan, run: Path) -> float:
    """Train on this rank, and return the loss on sequences that were not trained on."""
    engine = shard(find(plan.model)[0], plan, RECIPE)
    dp_rank = engine.groups.dp_rank
    for step in range(engine.load(run), RECIPE.steps):
        result = engine.step(counting(plan, step, dp_rank))
        if step % 5 == 0 and torch.distributed.get_rank() == 0:
            print(f"step {step}: loss {result.loss:.3f}, gradient norm {result.grad_norm:.2f}, lr {result.lr:.1e}")
    engine.save(run)
    return engine.evaluate([counting(plan, 1000, dp_rank)]).loss


if __name__ == "__main__":
    model, ref = find("stdlib-gpt")
    workload = Workload(seq=64, batch=8, precision=Precision.FP32)
    made = plan(model, cluster("2xCPU"), workload, ref=ref).best
    arguments = (made, Path("runs/own-loop"))
    loss = train(*arguments) if started_by_launcher() else launcher.run(train, arguments, made.layout)[0]
    print(f"held-out loss {loss:.3f}")
