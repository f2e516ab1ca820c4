"""Runs that are killed at drawn moments of training and saving, and continued by the same command.

    python -m tests.support.faults                 # 50 moments; appends to .faults/, and goes on with those missing
    python -m tests.support.faults --moment 17     # one of them again

Each run must continue from the newest checkpoint whose save had ended, and its losses must equal those of a run that
was not killed, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import psutil
from attrs import asdict, fields, frozen

from megaloom.dsl.catalog import find
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.search.search import plan as search
from megaloom.runtime import Recipe, train
from megaloom.runtime.checkpoints.checkpoint_folder import CheckpointError, checkpoint_folders, read
from megaloom.runtime.launch.rank_errors import RankError
from megaloom.runtime.megatron import device
from tests.support.limits import LIMIT
from tests.support.paths import TEST_MODELS, TESTS

RESULTS = TESTS.parent / ".faults" / "moments.jsonl"
LAYOUTS = (
    *(Layout(dp=2), Layout(tp=2), Layout(pp=2), Layout(dp=2, shard="optimizer")),
    *(Layout(dp=2, shard="weights"), Layout(dp=2, shard="gradients")),
)
STEPS, SAVE_EVERY, MOMENTS = 8, 2, 50
RECIPE = Recipe(steps=STEPS, lr=1e-2, warmup=2)


@frozen
class Moment:
    """The moment at which a process of a run is killed."""

    layout: Layout
    asynchronous: bool  # saves
    victim: Literal["launcher", "rank"]
    saving: bool  # counted from the begin of a save, else from the end of a step
    count: int  # saves that have begun, or steps that have ended
    delay: float  # seconds after that


@frozen
class Outcome:
    """The result of killing a run and continuing it."""

    saved: int  # the newest step whose save had ended
    resumed: int  # the step from which the command continued
    equal: bool  # losses, with those of the run that was not killed
    message: str  # of the run that lost a rank
    left: tuple[str, ...] = ()  # processes and unfinished folders that the runs have left

    @property
    def problem(self) -> str:
        """Return what is wrong; "" if nothing is."""
        if self.resumed != self.saved:
            return f"continued from step {self.resumed}; step {self.saved} was saved"
        if self.left:
            return f"left {', '.join(self.left)}"
        if self.message and f"Step {self.saved} is saved; the same command" not in self.message and self.saved:
            return f"step {self.saved} is not named: {self.message}"
        return "" if self.equal else "other losses than the run that was not killed"


def drawn(number: int, seed: int = 1) -> Moment:
    """Return moment `number`."""
    source = random.Random(f"{seed}-{number}")
    saving = source.random() < 0.6
    return Moment(
        layout=source.choice(LAYOUTS),
        asynchronous=source.random() < 0.6,
        victim=source.choice(("launcher", "rank")),
        saving=saving,
        count=source.randint(1, STEPS // SAVE_EVERY if saving else STEPS - 1),
        delay=source.uniform(0, 0.15 if saving else 0.05),
    )


def plan_of(layout: Layout) -> Plan:
    """Return the plan of a tiny model under a layout."""
    model, ref = find(f"{TEST_MODELS / 'small.py'}:byte_llama")
    fixed = {f.name: getattr(layout, f.name) for f in fields(Layout)}
    workload = Workload(seq=32, batch=4, precision=Precision.FP32)
    return search(model, cluster(f"{layout.world}xCPU"), workload, ref=ref, fixed=fixed).best


def outcome(moment: Moment, straight: list[float], text: Path, folder: Path) -> Outcome:
    """Run in a folder, kill at the moment, and run again. straight: the losses of the run that was not killed."""
    with started(moment, text, folder) as (launcher, results):
        orphans = kill(launcher, moment, folder)
        message = results.get() if not results.empty() else ""
    saved = newest(folder)
    resumed = trained(moment, text, folder)
    left = orphans + [path.name for path in folder.glob("step-*") if path not in checkpoint_folders(folder)]
    return Outcome(saved, resumed, losses(folder) == straight, str(message), tuple(left))


def trained(moment: Moment, text: Path, folder: Path) -> int:
    """Train to the end in a process of its own, and return the step from which it continued."""
    with started(moment, text, folder) as (launcher, results):
        launcher.join(LIMIT)
        result = results.get() if not results.empty() else "it has not ended"
    if not isinstance(result, int):
        raise AssertionError(f"a run that nobody killed: {result}")
    return result


@contextmanager
def started(moment: Moment, text: Path, folder: Path) -> Iterator[tuple[Any, Any]]:
    """Train in a process, which begins as a copy of this one. Give the process and a queue with its result."""
    device.prepare()
    import megaloom.runtime.training.loop  # noqa: F401 (once, here: ranks are forked)

    context = multiprocessing.get_context("fork")
    results: Any = context.SimpleQueue()
    process = context.Process(target=_train, args=(moment, text, folder, results))
    process.start()
    try:
        yield process, results
    finally:
        process.kill()
        process.join()


def _train(moment: Moment, text: Path, folder: Path, results: Any) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    saves = {"save_every": SAVE_EVERY, "evaluate_every": STEPS, "async_save": moment.asynchronous}
    try:
        results.put(train(plan_of(moment.layout), RECIPE, folder=folder, source=str(text), **saves).resumed or 0)
    except RankError as error:
        results.put(str(error))


def kill(launcher: Any, moment: Moment, folder: Path) -> list[str]:
    """Kill the process that started the ranks, or a rank, at the moment. Return the processes that do not end."""
    parent, deadline = psutil.Process(launcher.pid), time.monotonic() + LIMIT
    while not _reached(moment, folder) and launcher.is_alive() and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(moment.delay)
    ranks = parent.children() if launcher.is_alive() else []
    victim = ranks[moment.count % len(ranks)] if ranks and moment.victim == "rank" else parent
    if launcher.is_alive():
        os.kill(victim.pid, signal.SIGKILL)
    launcher.join(LIMIT)
    _, alive = psutil.wait_procs([*ranks, parent], timeout=LIMIT)
    return [str(process) for process in alive]


def _reached(moment: Moment, folder: Path) -> bool:
    if not moment.saving:
        return len(losses(folder)) >= moment.count
    steps = {path.name[:11] for path in folder.glob("step-*")}  # of the saves that have begun
    return f"step-{moment.count * SAVE_EVERY:06d}" in steps


def newest(folder: Path) -> int:
    """Return the step of the newest whole checkpoint; 0 if there is none."""
    for path in reversed(checkpoint_folders(folder)):
        try:
            return read(path).manifest.step
        except CheckpointError:
            continue
    return 0


def losses(folder: Path) -> list[float]:
    """Return the loss of each step."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event["loss"] for event in events if event["event"] == "step"]


@contextmanager
def references() -> Iterator[tuple[Path, Callable[[Moment], list[float]]]]:
    """Give a text to train on, and the losses of the run that was not killed, computed once for each layout."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="megaloom-faults-") as name:
        text = Path(name) / "text.txt"
        text.write_text(Path(__file__).read_text() * 2)

        def of(moment: Moment) -> list[float]:
            key = str(moment.layout)
            if key not in found:
                folder = Path(name) / f"straight-{len(found)}"
                trained(moment, text, folder)
                found[key] = losses(folder)
            return found[key]

        yield text, of


def main() -> int:
    """Run the moments that have no result yet, and return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=MOMENTS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--moment", type=int, help="repeat this moment only")
    options = parser.parse_args()
    RESULTS.parent.mkdir(exist_ok=True)
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    done = {(r["seed"], r["moment"]): r["problem"] for r in map(json.loads, lines)}
    numbers = range(options.moments) if options.moment is None else [options.moment]
    problems = {n: done[options.seed, n] for n in numbers if (options.seed, n) in done and options.moment is None}
    with references() as (text, straight), tempfile.TemporaryDirectory(prefix="megaloom-faults-") as folder:
        for n in (n for n in numbers if n not in problems):
            moment = drawn(n, options.seed)
            result = outcome(moment, straight(moment), text, Path(folder) / str(n))
            problems[n] = result.problem
            line = {"seed": options.seed, "moment": n, "problem": result.problem, "saved": result.saved}
            with RESULTS.open("a") as file:
                file.write(json.dumps({**line, "drawn": asdict(moment)}, default=str) + "\n")
            what = f"{'saving' if moment.saving else 'training'} {moment.count} + {1000 * moment.delay:.0f} ms"
            kind = "asynchronous" if moment.asynchronous else "synchronous"
            print(f"{n}: {moment.layout}, {kind}, {moment.victim} killed at {what}: ", end="")
            print(f"{result.problem or 'sound'} (continued from step {result.resumed})", flush=True)
    failed = [n for n, problem in problems.items() if problem]
    print(f"{len(problems)} moments, {len(failed)} failed" + (f": {failed}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
