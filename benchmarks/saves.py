"""Time for which a save stops training, synchronous and asynchronous, on this machine's devices.

    python -m benchmarks.saves plan.json [FOLDER]

It saves three times each way into FOLDER (by default a temporary one), with ten training steps before each save, and as
many after it as run until all threads have written. The first asynchronous save also allocates pinned host memory.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from attrs import frozen

from megaloom.dsl.catalog import find
from megaloom.planner.contract.plan_json import load
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe
from megaloom.runtime.launch import launcher

SAVES, STEPS_BETWEEN = 3, 10


@frozen
class Times:
    """Seconds of the training steps between saves."""

    steps: list[float]  # while nothing is written
    steps_meanwhile: list[float]  # while a thread writes


def main() -> int:
    """Time saves of the plan named on the command line."""
    plan = load(Path(sys.argv[1]))
    with TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as folder:
        for asynchronous in (False, True):
            run = Path(folder) / str(asynchronous)
            print("asynchronous" if asynchronous else "synchronous", flush=True)
            times = launcher.run(time_saves, (plan, run, asynchronous), plan.layout)[0]
            size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file()) / 2**30
            step, meanwhile = (statistics.median(s or [0.0]) for s in (times.steps, times.steps_meanwhile))
            during = f", during a save {meanwhile:.3f} s" if asynchronous else ""
            print(f"  {size:.2f} GiB; a step takes {step:.3f} s{during}", flush=True)
    return 0


def time_saves(plan: Plan, run: Path, asynchronous: bool) -> Times:
    """On each rank: save, and train until the checkpoint is written."""
    from megaloom.runtime.checkpoints.checkpoint_folder import Retention
    from megaloom.runtime.checkpoints.saver import Saver
    from megaloom.runtime.engine.engine import Engine
    from megaloom.runtime.launch.agreement import gathered
    from megaloom.runtime.samples.samples import Sample, SampleMaker
    from megaloom.runtime.training.frozen_objects import existing_objects_frozen

    engine = Engine.build(plan, find(plan.model)[0], Recipe(steps=10**6))
    maker, times = SampleMaker.of(engine.graph, plan.workload.seq), Times([], [])

    def sample(i: int) -> Sample:
        generator = torch.Generator().manual_seed(i)
        return maker.make(torch.randint(maker.ids, (maker.length,), generator=generator), i, 0)

    def step() -> float:
        start = time.monotonic()
        engine.step(sample)
        return time.monotonic() - start

    step()
    saver = Saver(run, Retention(last=1), asynchronous)
    with existing_objects_frozen():  # as in training
        for _ in range(SAVES):
            for _ in range(STEPS_BETWEEN):
                times.steps.append(step())
            saver.start(engine.state, engine.manifest())
            assert saver.pending
            start = saver.pending.stall_seconds
            while any(gathered(saver.is_writing)):
                times.steps_meanwhile.append(step())
            saved = saver.finish()
            assert saved
            if torch.distributed.get_rank() == 0:
                start_and_end = f"{start:.3f} s at its start, {saved.stall_seconds - start:.3f} s at its end"
                print(f"  a save of {saved.seconds:.3f} s stops training for {start_and_end}", flush=True)
    saver.close()
    return times


if __name__ == "__main__":
    sys.exit(main())
