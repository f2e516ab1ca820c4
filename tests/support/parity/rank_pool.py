"""Many short runs in one set of processes: each run has process groups of its own, so that starting ranks costs once.

`run_cases` compares each case with one process and with the oracle, as `megaloom verify` does. Each distinct reference
is computed once, by one of the processes in a world of its own.
"""

from __future__ import annotations

import json
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import asdict, frozen

from megaloom.dsl import Model, graph
from megaloom.dsl.catalog import find
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Precision
from megaloom.runtime.launch import launcher
from megaloom.runtime.launch.rank import connect
from megaloom.runtime.training.verify import (
    Comparison,
    Curve,
    ShortRun,
    gradient_differences,
    rounding_noise,
    single_process,
    tolerance,
)
from tests.support.parity.axes import axes_of
from tests.support.parity.broken_collectives import BROKEN
from tests.support.parity.families import FAMILIES
from tests.support.parity.feeds import Feed
from tests.support.parity.hf_oracle import HF, of_config
from tests.support.parity.long_run import Reference, Trace, after, before, differences
from tests.support.parity.long_run import reference as long_reference
from tests.support.parity.mutants import MUTANTS
from tests.support.parity.oracle import Oracle, learning_rates, stacked

BREAKS = {name: it.breaks for name, it in BROKEN.items()} | {name: it.breaks for name, it in MUTANTS.items()}
SEED, STEPS = 1234, 2  # of a short case; a long one checks the weights after three
COLLECTIVE_TIMEOUT = timedelta(seconds=120)  # after one rank has failed, the others leave the run and go on
PATIENCE = timedelta(minutes=15)  # for processes that are still busy with other cases


NO_PLAN: Any = None


@frozen(eq=False)
class Case:
    """One plan to compare."""

    name: str
    model: str  # a family, a reference to a model, or "transformers:" and a config
    plan: Plan = NO_PLAN
    dropout: float = 0.0
    broken: str = ""  # a collective that is broken on purpose, of `broken_collectives`, or a defect of `mutants`
    is_long: bool = False  # with weights, an evaluation and, if there is a second plan, a checkpoint
    second: Plan | None = None  # under which the run goes on
    refused: int = 0  # layouts that were drawn before and are not legal
    feed: Feed = Feed.SAMPLES  # of a long case

    def make(self) -> Model:
        """Return the model, one object for all cases of this process."""
        return model_of(self.model, self.dropout)

    @property
    def processes(self) -> int:
        """Return the number of processes that the case needs."""
        return max(self.plan.layout.world, self.second.layout.world if self.second else 1)

    @property
    def reference(self) -> str:
        """Return a name of the single run that this case is compared with."""
        work = self.plan.workload
        micro_batch = 0 if self.is_long else self.plan.layout.micro_batch
        parts = (self.model, self.dropout, micro_batch, work.seq, work.batch, work.precision)
        parts += (self.feed is Feed.OWN_STEP,)
        return sha256(repr(parts).encode()).hexdigest()[:16]


@cache
def model_of(name: str, dropout: float) -> Model:
    """Return the model of a case. Its graph is built once, because `graph` remembers the last models."""
    if name.startswith(HF):
        return of_config(name).model
    return FAMILIES[name].make(dropout) if name in FAMILIES else find(name)[0]


@frozen
class Result:
    """Differences of a case from one process, and of that process from the oracle."""

    name: str
    model: str
    layout: str
    loss_error: float = 0.0
    norm_error: float = 0.0
    gradient_error: float = 0.0
    oracle_loss_error: float = 0.0
    oracle_gradient_error: float = 0.0
    differing: tuple[str, ...] = ()  # weights whose gradients differ from those of one process
    oracle_differing: tuple[str, ...] = ()  # weights whose gradients in one process differ from the oracle's
    tolerance: float = 1e-5
    losses: tuple[float, ...] = ()
    error: str = ""
    seconds: float = 0.0
    weight_error: float = 0.0  # after three steps; this and what follows are of long cases
    evaluation_error: float = 0.0
    resumed_error: float = 0.0
    axes: tuple[str, ...] = ()
    refused: int = 0

    @property
    def agrees(self) -> bool:
        """Return whether all differences are within the tolerance."""
        errors = (self.loss_error, self.norm_error, self.gradient_error, self.oracle_loss_error)
        errors += (self.weight_error, self.evaluation_error, self.resumed_error)
        within = all(e <= self.tolerance for e in (*errors, self.oracle_gradient_error))
        return within and not self.error and not self.differing and not self.oracle_differing


def run_cases(
    cases: Sequence[Case],
    world: int,
    *,
    timeout: float | None = None,
    progress: Path | None = None,
    references: Path | None = None,
) -> list[Result]:
    """Compare all cases in `world` processes, and return the results in their order.

    references: a folder that keeps what single processes computed, for the next call. Each result is also appended to
    the file `progress` as soon as it is there, one JSON object a line. If a process dies, the cases that it ran are
    repeated one by one, and the rest goes on in new processes.
    """
    results: dict[int, Result] = {}
    left, alone = list(range(len(cases))), list[int]()
    while left or alone:
        some = alone[:1] or left
        with tempfile.TemporaryDirectory(prefix="megaloom-parity-") as folder:
            try:
                launcher.run(work, ([cases[i] for i in some], folder, references, progress), world, timeout=timeout)
                error = ""
            except launcher.RankError as failure:
                error = str(failure)
            started, found = written(Path(folder), [cases[i] for i in some])
        started, found = {some[i] for i in started}, {some[i]: result for i, result in found.items()}
        if error and not started:
            raise RuntimeError(error)
        if error and len(some) == len(started) == 1:
            found = {some[0]: failed(cases[some[0]], error)}
        alone = [i for i in alone if i not in found] + sorted(started - found.keys() - set(alone))
        left = [i for i in left if i not in started]
        results |= found
        record(progress, [result for result in found.values() if result.error])
    return [results[i] for i in range(len(cases))]


def record(progress: Path | None, results: Iterable[Result]) -> None:
    """Append results to a progress file, one JSON object a line. The last line of a name counts."""
    if progress is not None:
        with progress.open("a") as file:
            file.write("".join(json.dumps(asdict(result)) + "\n" for result in results))


def explanation(r: Result) -> str:
    """Return what differs, or the error."""
    if r.error:
        return r.error.replace("\n", "\n  ")
    weights = [*r.differing, *(f"{name} (from the oracle)" for name in r.oracle_differing)]
    named = f"; {len(weights)} weights: {', '.join(weights[:6])}" if weights else ""
    longer = f", weights {r.weight_error:.1e}, evaluation {r.evaluation_error:.1e}, after loading {r.resumed_error:.1e}"
    longer = longer if r.axes else ""
    return (
        f"losses {r.loss_error:.1e}, norms {r.norm_error:.1e}, gradients {r.gradient_error:.1e}{longer}; "
        f"one process from the oracle: losses {r.oracle_loss_error:.1e}, gradients {r.oracle_gradient_error:.1e}{named}"
    )


def check(results: Sequence[Result]) -> None:
    """Raise AssertionError that names the cases that differ, or whose losses are all equal: they did not train."""
    wrong = [f"{r.name}: {r.model}, {r.layout}: {explanation(r)}" for r in results if not r.agrees]
    assert not wrong, "\n".join(wrong)
    constant = [r.name for r in results if len(set(r.losses)) < STEPS]
    assert not constant, f"equal losses in all steps: {constant}"


def written(folder: Path, cases: Sequence[Case]) -> tuple[set[int], dict[int, Result]]:
    """Return which cases have started, and the results of those that have ended, from the files of the processes."""
    started = {int(path.stem) for path in folder.glob("*.started")}
    found = {int(path.stem): torch.load(path, weights_only=False) for path in folder.glob("*.result")}
    found |= {int(path.stem): failed(cases[int(path.stem)], path.read_text()) for path in folder.glob("*.error")}
    return started, found


def failed(case: Case, error: str) -> Result:
    """Return the result of a case that has ended in an error."""
    axes = axes_of(case) if case.is_long else ()
    return Result(case.name, case.model, described(case), error=error, axes=axes, refused=case.refused)


def described(case: Case) -> str:
    """Return the layout of a case, and the one under which it goes on."""
    return str(case.plan.layout) + (f", then {case.second.layout}" if case.second else "")


def work(cases: list[Case], folder: str, kept: Path | None = None, progress: Path | None = None) -> None:
    """Run on each process its references, then its part of the cases; the first rank of a case writes its result."""
    store: Any = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    references, known = {case.reference: case for case in cases}, Path(kept or folder)
    for i, (name, case) in enumerate(references.items()):
        if i % size == rank and (known / name).exists():
            store.set(f"done {name}", "")
        elif i % size == rank:
            with process_group(store, f"reference {name}", 0, 1):
                outcome = attempt(partial(long_reference if case.is_long else reference, case))
            torch.save(outcome, known / name)
            store.set(f"done {name}", "")
    first = 0
    for i, case in enumerate(cases):
        members = [(first + k) % size for k in range(case.processes)]
        first = (members[-1] + 1) % size
        if rank not in members:
            continue
        start = time.monotonic()
        (Path(folder) / f"{i}.started").touch()
        outcome = run_parts(store, i, case, members.index(rank), Path(folder) / f"run-{i}")
        if isinstance(outcome, str):  # the first process that failed says why; others lose their connection to it
            with suppress(FileExistsError), (Path(folder) / f"{i}.error").open("x") as file:
                file.write(outcome)
        if rank == members[0]:
            store.wait([f"done {case.reference}"], PATIENCE)
            expected = torch.load(known / case.reference, weights_only=False)
            result = compared(case, outcome, expected, time.monotonic() - start)
            torch.save(result, Path(folder) / f"{i}.result")
            record(progress, [result])


def run_parts(store: Any, i: int, case: Case, index: int, folder: Path) -> Any:
    """Run a case as process `index` of it, and return what it measured, or the text of an error.

    A long case has up to two parts, each in a world of its own. The second one begins once the first process has saved.
    """
    if not case.is_long:
        with process_group(store, f"case {i}", index, case.plan.layout.world):
            return attempt(partial(planned, case))
    early, late = None, None
    if index < case.plan.layout.world:
        with process_group(store, f"case {i}", index, case.plan.layout.world):
            early = attempt(partial(broken, case, partial(before, case, folder)))
    if case.second is not None:
        if index == 0:
            store.set(f"saved {i}", "no" if isinstance(early, str) else "yes")
        store.wait([f"saved {i}"], PATIENCE)
        if store.get(f"saved {i}") == b"yes" and index < case.second.layout.world and not isinstance(early, str):
            with process_group(store, f"case {i} again", index, case.second.layout.world):
                late = attempt(partial(broken, case, partial(after, case, folder)))
    return next((part for part in (early, late) if isinstance(part, str)), (early, late))


def broken(case: Case, call: Callable[[], Any]) -> Any:
    """Return the value of a call, with what the case breaks on purpose broken."""
    with BREAKS[case.broken]() if case.broken else nullcontext():
        return call()


@contextmanager
def process_group(store: Any, name: str, rank: int, size: int) -> Iterator[None]:
    """Make these processes a world of their own inside the context."""
    from megatron.core import parallel_state

    own = dist.PrefixStore(name, store)
    own.set(f"ready {rank}", "")
    own.wait([f"ready {other}" for other in range(size)], PATIENCE)
    connect(rank, size, own, COLLECTIVE_TIMEOUT)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def attempt(call: Any) -> Any:
    """Return the value of a call, or the text of its error."""
    try:
        return call()
    except Exception:
        return traceback.format_exc()


def planned(case: Case) -> tuple[Curve, dict[str, tuple[torch.Tensor, float]] | None]:
    """Return the curve under the plan, and on rank 0 the gradients with what ranks disagree on."""

    def run() -> tuple[Any, Curve]:
        return ShortRun.of(case.plan, case.make(), STEPS, SEED).gradients_and_curve(STEPS)

    gradients, curve = broken(case, run)
    return curve, gradients and {name: (g.value, g.disagreement) for name, g in gradients.items()}


def reference(case: Case) -> tuple[Curve, dict[str, torch.Tensor], dict[str, float], Comparison]:
    """Return curve, gradients and their noise in one process, and how they differ from the oracle's."""
    model = case.make()
    run = ShortRun.of(single_process(case.plan, model), model, STEPS, SEED)
    rounded = run.rounded_gradients()
    gradients, curve = run.gradients_and_curve(STEPS)
    assert gradients is not None and rounded is not None
    noise = rounding_noise(gradients, rounded)
    size, limit = case.plan.workload.batch, tolerance(case.plan.workload.precision)
    if case.plan.workload.precision is not Precision.FP32:  # the oracle computes in fp32
        return curve, {k: g.value for k, g in gradients.items()}, noise, Comparison(curve, curve, limit)
    oracle = Oracle.of(model, run.engine.recipe)
    batches = [stacked(partial(run.sample, step), range(size)) for step in range(STEPS)]
    rates = learning_rates(run.engine, STEPS)
    first, declared = oracle.step_with_gradients(batches[0], rates[0])
    values = {name: (g.value, g.disagreement) for name, g in gradients.items()}
    precision = case.plan.workload.precision
    differences = gradient_differences(run.engine.graph, values, declared, noise, precision)
    steps = [first, *(oracle.step(batch, lr) for batch, lr in zip(batches[1:], rates[1:], strict=True))]
    exact = Curve(tuple(s.loss for s in steps), tuple(s.grad_norm for s in steps))
    return curve, {k: g.value for k, g in gradients.items()}, noise, Comparison(curve, exact, limit, differences)


def compared(case: Case, outcome: Any, expected: Any, seconds: float) -> Result:
    """Return the result of a case from the values of `planned` and `reference`, or their errors."""
    named: dict[str, Any] = {"name": case.name, "model": case.model, "layout": described(case), "seconds": seconds}
    named |= {"axes": axes_of(case), "refused": case.refused} if case.is_long else {}
    for what, value in (("one process", expected), ("the layout", outcome)):
        if isinstance(value, str):
            return Result(**named, error=f"{what}: {value}")
    if case.is_long:
        return Result(**named, **_of_long_run(case, outcome, expected))
    (curve, gradients), (single, values, noise, oracle) = outcome, expected
    limit = tolerance(case.plan.workload.precision)
    precision = case.plan.workload.precision
    differences = gradient_differences(graph(case.make()), gradients, values, noise, precision)
    found = Comparison(curve, single, limit, differences)
    return Result(
        **named,
        loss_error=found.loss_error,
        norm_error=found.norm_error,
        gradient_error=found.gradient_error,
        oracle_loss_error=oracle.loss_error,
        oracle_gradient_error=oracle.gradient_error,
        differing=tuple(d.weight for d in found.differing),
        oracle_differing=tuple(d.weight for d in oracle.differing),
        tolerance=limit,
        losses=curve.losses,
    )


def _of_long_run(case: Case, outcome: tuple[Trace, Trace | None], expected: Reference) -> dict[str, Any]:
    """Return the fields of the result of a long case."""
    early, late = outcome
    found = differences(case, early, late, expected)
    return {
        "loss_error": found.loss,
        "norm_error": found.norm,
        "gradient_error": found.gradient,
        "oracle_loss_error": expected.oracle_errors[0],
        "oracle_gradient_error": expected.oracle_errors[1],
        "differing": found.differing,
        "oracle_differing": expected.oracle_differing,
        "tolerance": tolerance(case.plan.workload.precision),
        "losses": early.curve.losses,
        "weight_error": found.weight,
        "evaluation_error": found.evaluation,
        "resumed_error": found.resumed,
    }
