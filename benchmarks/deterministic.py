"""Check that training with `deterministic` is bitwise equal after a restart, on this machine's devices.

    python -m benchmarks.deterministic plan.json

It trains six steps twice, the second time from a checkpoint of step 3, and compares the losses, the gradient norms and
the SHA-256 of every weight and moment on every rank.
"""

from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from megaloom.dsl.catalog import find
from megaloom.dsl.graph import vocabulary
from megaloom.planner.contract.plan_json import load
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe
from megaloom.runtime.launch import launcher

STEPS, SAVED = 6, 3


def main() -> int:
    """Check the plan named on the command line."""
    plan = load(Path(sys.argv[1]))
    with TemporaryDirectory() as folder:
        equal = restart_is_bitwise_equal(plan, Path(folder), vocabulary(find(plan.model)[0]))
    print(f"{plan.model} under {plan.layout}: a restart is {'bitwise equal' if equal else 'NOT bitwise equal'}")
    return 0 if equal else 1


def restart_is_bitwise_equal(plan: Plan, folder: Path, vocab: int) -> bool:
    """Return whether steps after a restart, and all weights and moments, have the bits of an uninterrupted run."""
    straight, resumed = (launcher.run(train_steps, (plan, folder, vocab, start), plan.layout) for start in (0, SAVED))
    return all(a[SAVED:] == b for a, b in zip(straight, resumed, strict=True))


def train_steps(plan: Plan, folder: Path, vocab: int, start: int) -> list[str]:
    """On each rank: train from step `start` to the last one, and save after step SAVED.

    Return loss and gradient norm of each step in hexadecimal, and then the hash of all weights and moments.
    """
    from megaloom.runtime.engine.engine import Engine
    from megaloom.runtime.megatron.optimizer_state import parameter_states
    from megaloom.runtime.megatron.weight_shards import own_values
    from megaloom.runtime.samples.samples import Sample, SampleMaker

    engine = Engine.build(plan, find(plan.model)[0], Recipe(steps=STEPS, warmup=0, deterministic=True))
    if start:
        assert engine.load(folder) == start

    maker = SampleMaker.of(engine.graph, plan.workload.seq)

    def sample(i: int) -> Sample:
        generator = torch.Generator().manual_seed(i)
        return maker.make(torch.randint(min(vocab, maker.ids), (maker.length,), generator=generator), i, 0)

    out = []
    for step in range(start, STEPS):
        result = engine.step(lambda i, step=step: sample(step * plan.workload.batch + i))  # type: ignore[misc]
        out.append(f"{result.loss.hex()} {result.grad_norm.hex()}")
        if engine.done == SAVED and not start:
            engine.save(folder)
    tensors = [t for one in parameter_states(engine.state.optimizer) for t in (own_values(one.param), *one.tensors)]
    digest = sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return [*out, digest.hexdigest()]


if __name__ == "__main__":
    sys.exit(main())
