"""Values that a drawn layout must share with one process: gradients, losses, weights, an evaluation, and a checkpoint.

`before(case, folder)` trains three steps under the layout of a case and saves; `after(case, folder)` loads under its
second layout and trains two more. `reference(case)` trains all five in one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import evolve, field, frozen
from torch import Tensor

from megaloom.dsl import UserError, graph
from megaloom.planner.contract.workload import Precision
from megaloom.runtime.samples.samples import Sample
from megaloom.runtime.training.verify import (
    EPS,
    NOISE_MARGIN,
    Curve,
    ShortRun,
    gradient_differences,
    rounding_noise,
    single_process,
    tolerance,
)
from tests.support.parity.feeds import Feed, LargeLogits
from tests.support.parity.hf_oracle import HF, of_config, transformers_step
from tests.support.parity.oracle import Oracle, learning_rates, stacked
from tests.support.parity.torch_twins import TWINS

if TYPE_CHECKING:
    from megaloom.planner.contract.plans import Plan
    from tests.support.parity.rank_pool import Case

SEED, STEPS, LATER = 1234, 3, 2
EVALUATED = 5  # sequences, which no layout divides
KEPT = (0.9, 0.5, 0.1)  # shares of the positions that a mask keeps, by the number of the sample
SMALLEST = 0.02  # scale of weights that start at zero


@frozen(eq=False)
class LongRun(ShortRun):
    """A short run whose masks count different numbers of tokens in each sample."""

    feed: Feed = Feed.SAMPLES

    def sample(self, step: int, i: int) -> Sample:
        """Return sample i of the global batch of a step."""
        found = super().sample(step, i)
        if "mask" in found and bool(found["mask"].all()):
            random = torch.Generator().manual_seed(SEED + 100 * step + i)
            mask = torch.rand(found["mask"].shape, generator=random) < KEPT[i % len(KEPT)]
            mask[0] = True
            found = {**found, "mask": mask}
        return found

    def fed(self, step: int) -> Any:
        """Return what this rank passes to the engine in a step."""
        if self.feed not in (Feed.BATCHES, Feed.FIRST_RANK):
            return partial(self.sample, step)
        if self.feed is Feed.FIRST_RANK and not self.is_first:
            return None
        x, rank = self.engine.plan.layout, self.engine.groups.dp_rank
        count = self.engine.plan.workload.batch // (x.dp * x.micro_batch)
        own = [(k * x.dp + rank) * x.micro_batch + j for k in range(count) for j in range(x.micro_batch)]
        return stacked(partial(self.sample, step), own)

    @property
    def is_first(self) -> bool:
        """Return whether this is the first of the ranks that share a batch."""
        groups = self.engine.groups
        return groups.pp_rank == groups.cp_rank == groups.tp_rank == 0

    def check_unequal_batches_are_refused(self) -> None:
        """Raise AssertionError if ranks that share a batch may pass different ones."""
        layout = self.engine.plan.layout
        if self.feed is not Feed.BATCHES or layout.world == layout.dp:
            return
        batch = self.fed(0)
        own = batch if self.is_first else {name: x.roll(1, -1) for name, x in batch.items()}
        try:
            self.engine.gradients(own)
        except UserError as error:
            if "has another batch than rank" not in str(error):
                raise
        else:
            raise AssertionError("ranks of one data-parallel rank trained on different batches")

    def evaluation(self) -> float:
        """Return the loss of a number of sequences that no layout divides."""
        return self.engine.evaluate_samples(partial(self.sample, STEPS + LATER), EVALUATED).loss


Tensors = Mapping[str, tuple[Tensor, float]]  # each with what ranks disagree on


@frozen(eq=False)
class Trace:
    """Values measured under a layout. The tensors are on rank 0."""

    curve: Curve
    weights: Tensors | None
    gradients: Tensors | None = None
    evaluation: float = 0.0


@frozen(eq=False)
class Reference:
    """Values measured in one process, and their differences from the oracle."""

    early: Trace
    late: Trace
    noise: Mapping[str, float]
    weight_noise: tuple[Mapping[str, float], Mapping[str, float]] = ({}, {})  # after three and five steps; none in fp32
    norm_noise: tuple[float, ...] = (0.0,) * STEPS  # relative, of each step
    oracle_errors: tuple[float, float] = (0.0, 0.0)  # of losses and norms, of gradients and weights
    oracle_differing: tuple[str, ...] = ()


def started(case: Case, plan: Plan) -> LongRun:
    """Return a run under a plan at step 0."""
    from megaloom.runtime.engine.engine import Engine
    from megaloom.runtime.optimizer.recipe import Recipe

    given = of_config(case.model).weights if case.model.startswith(HF) else None
    recipe, model = Recipe(steps=10, seed=SEED, warmup=0, eps=EPS), case.make()
    steps = LargeLogits(graph(model).predictions[0]) if case.feed is Feed.OWN_STEP else None
    return LongRun(Engine.build(plan, model, recipe, steps, weights=given), SEED, case.feed)


def before(case: Case, folder: Path) -> Trace:
    """Train, evaluate and save under the layout of a case."""
    run = started(case, case.plan)
    run.check_unequal_batches_are_refused()
    gradients, curve = run.gradients_and_curve(STEPS)
    weights, evaluation = whole_weights(run.engine), run.evaluation()
    if case.second is not None:
        run.engine.save(folder)
    return Trace(curve, weights, gradients and {n: (g.value, g.disagreement) for n, g in gradients.items()}, evaluation)


def after(case: Case, folder: Path) -> Trace:
    """Load under the second layout of a case, and train on."""
    assert case.second is not None
    run = started(case, case.second)
    assert run.engine.load(folder) == STEPS, "the checkpoint is not that of the last step"
    return Trace(run.curve(LATER, first=STEPS), whole_weights(run.engine))


def reference(case: Case) -> Reference:
    """Train in one process, with micro-batches of one sequence and without padding."""
    plan = single_process(case.plan, case.make())
    run = started(case, evolve(plan, layout=evolve(plan.layout, micro_batch=1)))
    rounded = run.rounded_gradients()
    gradients, curve = run.gradients_and_curve(STEPS)
    assert gradients is not None and rounded is not None
    noise = rounding_noise(gradients, rounded)
    found = {n: (g.value, g.disagreement) for n, g in gradients.items()}
    early = Trace(curve, whole_weights(run.engine), found, run.evaluation())
    late = Trace(run.curve(LATER, first=STEPS), whole_weights(run.engine))
    if plan.workload.precision is not Precision.FP32:
        other = started(case, evolve(plan, layout=evolve(plan.layout, micro_batch=1)))
        (after_three, norms), (after_five, _) = noise_after(other, early, STEPS), noise_after(other, late, LATER)
        return Reference(early, late, noise, (after_three, after_five), norms)
    if case.feed is Feed.OWN_STEP:  # which the oracles do not know
        return Reference(early, late, noise)
    return evolve(Reference(early, late, noise), **_oracle(case, run, early, noise))


def noise_after(run: LongRun, expected: Trace, steps: int) -> tuple[dict[str, float], tuple[float, ...]]:
    """Train on in 16 bits with weights that are rounded anew before each step. Return how far weights and norms end.

    The optimizer has weights of 32 bits, which are not rounded: only gradients have the noise. The norm of a step has
    at least the noise of the steps before it, for it is that of weights that they have moved.
    """
    norms = []
    for step in range(run.engine.done, run.engine.done + steps):
        with torch.no_grad():
            for p in (p for chunk in run.engine.model_chunks for p in chunk.parameters()):
                p.mul_(1 + torch.finfo(p.dtype).eps * torch.sin(1e4 * p.float()).sign())
        norms += run.curve(1, first=step).grad_norms
    weights = whole_weights(run.engine)
    assert weights is not None and expected.weights is not None
    changed = {n: float((value - expected.weights[n][0]).abs().max()) for n, (value, _) in weights.items()}
    each = (abs(a - b) / max(1.0, b) for a, b in _pairs(norms, expected.curve.grad_norms))
    return changed, tuple(accumulate(each, max))


def _oracle(case: Case, run: LongRun, early: Trace, noise: Mapping[str, float]) -> dict[str, Any]:
    """Return by how much one process differs from the oracle."""
    oracle, size = Oracle.of(case.make(), run.engine.recipe), case.plan.workload.batch
    if case.model.startswith(HF):
        oracle.give(of_config(case.model).weights)
    oracle.twin = TWINS.get(case.model.rpartition("twins.py:")[2])
    batches = [stacked(partial(run.sample, step), range(size)) for step in range(STEPS)]
    lrs = learning_rates(run.engine, STEPS)
    balance = oracle.balancing_gradients(batches[0]) if case.model.startswith(HF) else {}
    first, declared = oracle.step_with_gradients(batches[0], lrs[0])
    others = [(first.loss, declared)]
    if case.model.startswith(HF):
        theirs, gradients = transformers_step(case.model, batches[0])
        others.append((theirs, {n: gradients[n] + g for n, g in balance.items()}))
    assert early.gradients is not None and early.weights is not None
    precision, graph_, differing, worst = Precision.FP32, run.engine.graph, list[str](), 0.0
    losses = [abs(early.curve.losses[0] - theirs) for theirs, _ in others]
    for _, expected in others:
        for d in gradient_differences(graph_, early.gradients, expected, noise, precision):
            worst = max(worst, known(d.relative))
            differing += [] if d.relative <= tolerance(precision) else [d.weight]
    steps = [first, *(oracle.step(batch, lr) for batch, lr in zip(batches[1:], lrs[1:], strict=True))]
    losses += [abs(s.loss - ours) for s, ours in zip(steps, early.curve.losses, strict=True)]
    losses += [abs(s.grad_norm - ours) / max(1.0, ours) for s, ours in zip(steps, early.curve.grad_norms, strict=True)]
    expected = {n: oracle.weights[n].detach() for n in early.weights}
    errors = weight_errors(early.weights, expected, {})
    differing += [f"{n} after {STEPS} steps" for n, e in errors.items() if not e <= tolerance(precision)]
    return {
        "oracle_errors": (max(losses), max([worst, *errors.values()])),
        "oracle_differing": tuple(dict.fromkeys(differing)),
    }


def weight_errors(
    found: Tensors, expected: Mapping[str, Tensor], noise: Mapping[str, float], precision: Precision = Precision.FP32
) -> dict[str, float]:
    """Return for each weight its largest difference and what ranks disagree on, relative to its largest element.

    noise: by how much rounding changes an element. Where that is more than the tolerance, it is the scale, as for
    gradients.
    """
    if found.keys() != expected.keys():
        raise AssertionError(f"only one run has the weights {sorted(found.keys() ^ expected.keys())}")
    margin = NOISE_MARGIN[precision] / tolerance(precision)
    out = {}
    for n, (value, gap) in found.items():
        scale = max(float(expected[n].abs().max()), SMALLEST, margin * noise.get(n, 0.0))
        out[n] = known((float((value - expected[n]).abs().max()) + gap) / scale)
    return out


def known(error: float) -> float:
    """Return a difference; infinity for one that is NaN."""
    return math.inf if math.isnan(error) else error


@torch.no_grad()
def whole_weights(engine: Any) -> dict[str, tuple[Tensor, float]] | None:
    """Return trained weights and corrections of experts by their declared names, on rank 0. Every rank calls it.

    The buffers of gradients, which the next step clears, carry the weights to the first rank.
    """
    from megaloom.runtime.body.corrections import corrections_of
    from megaloom.runtime.engine.gradients import gather_gradients

    own: dict[str, Tensor] = {}
    for chunk in engine.state.chunks:
        if chunk.ddp_config.use_distributed_optimizer:
            chunk.start_param_sync(force_sync=True)  # a gather of the last update may be pending
        for p in (p for p in chunk.parameters() if p.requires_grad):
            p.main_grad.copy_(p)
        for node, module in chunk.module.node_modules():
            for found in corrections_of([module]):
                own[f"{node.name}.correction"] = found.value.clone()
    weights = gather_gradients(engine.state.chunks)
    each: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.gather_object(own, each if weights is not None else None)
    if weights is None:
        return None
    out = {n: (w.value, w.disagreement) for n, w in weights.items()}
    if engine.plan.workload.precision is Precision.FP32:  # else rounding may move a token to another expert
        for name in {name for of_rank in each for name in of_rank}:
            values = torch.stack([of_rank[name] for of_rank in each if name in of_rank])
            out[name] = values[0], float((values.amax(0) - values.amin(0)).max())
    return out


@frozen
class Errors:
    """The largest differences of a case from one process."""

    loss: float = 0.0
    norm: float = 0.0
    gradient: float = 0.0
    weight: float = 0.0  # after three steps
    evaluation: float = 0.0
    resumed: float = 0.0  # of losses and weights after two more steps under the second layout
    differing: tuple[str, ...] = field(factory=tuple)


def differences(case: Case, early: Trace, late: Trace | None, expected: Reference) -> Errors:
    """Return how a case differs from one process."""
    precision = case.plan.workload.precision
    limit, g = tolerance(precision), graph(case.make())
    assert early.gradients is not None and early.weights is not None
    assert expected.early.gradients is not None and expected.early.weights is not None
    single = {n: value for n, (value, _) in expected.early.gradients.items()}
    found = gradient_differences(g, early.gradients, single, expected.noise, precision)
    after_three, after_five = expected.weight_noise
    values = {n: v for n, (v, _) in expected.early.weights.items()}
    weights = weight_errors(early.weights, values, after_three, precision)
    names = [d.weight for d in found if not d.relative <= limit]
    names += [f"{n} after {STEPS} steps" for n, e in weights.items() if not e <= limit]
    resumed = 0.0
    if late is not None:
        assert late.weights is not None and expected.late.weights is not None
        values = {n: v for n, (v, _) in expected.late.weights.items()}
        later = weight_errors(late.weights, values, after_five, precision)
        names += [f"{n} after loading" for n, e in later.items() if not e <= limit]
        resumed = max(_apart(late.curve.losses, expected.late.curve.losses), *later.values())
    return Errors(
        loss=_apart(early.curve.losses, expected.early.curve.losses),
        norm=max(
            known(abs(a - b)) / max(1.0, b) / max(1.0, NOISE_MARGIN[precision] * noise / limit)
            for a, b, noise in _pairs(early.curve.grad_norms, expected.early.curve.grad_norms, expected.norm_noise)
        ),
        gradient=max((known(d.relative) for d in found), default=0.0),
        weight=max(weights.values(), default=0.0),
        evaluation=known(abs(early.evaluation - expected.early.evaluation)),
        resumed=resumed,
        differing=tuple(names),
    )


_pairs: Callable[..., Any] = partial(zip, strict=True)


def _apart(found: tuple[float, ...], expected: tuple[float, ...]) -> float:
    return max(known(abs(a - b)) for a, b in _pairs(found, expected))
