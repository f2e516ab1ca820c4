"""Verification: a plan computes what one process computes.

`compare` runs a few steps under the plan and in one process, from one seed and on the same tokens. Only the layout
differs. It compares the gradient of each weight in the first step, then losses and gradient norms. The command
`megaloom verify` and the parity tests use it.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Graph, Model, graph
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.planned_model import planned_model
from megaloom.planner.contract.plans import Plan, Stage
from megaloom.planner.contract.workload import Backend, Precision
from megaloom.planner.rules.plan_check import check_plan, check_trainable
from megaloom.runtime.launch import launcher
from megaloom.runtime.megatron import device
from megaloom.runtime.optimizer.recipe import Recipe
from megaloom.runtime.reference.declared_reads import check_graph
from megaloom.runtime.samples.samples import Sample, SampleMaker

from .chosen_backend import with_backend
from .host_memory import check_host_memory
from .layout_dropout import layout_dropout, without_dropout

if TYPE_CHECKING:
    from megaloom.runtime.engine.engine import Engine
    from megaloom.runtime.engine.gradients import WeightGradient

EPS = 1e-3
"""Epsilon of Adam: its first step is about g / (|g| + EPS), which amplifies noise in g where g is not above EPS."""

NOISE_MARGIN = {Precision.FP32: 20.0, Precision.BF16: 5.0, Precision.FP16: 5.0, Precision.FP8: 5.0}
"""Most by which the rounding noise of a gradient differs between layouts, over what a rounding of weights changes.

Correct layouts reached 4 in fp32, where a weight is rounded by 1e-7 of its value and sums over tokens dominate, and 0.5
in bf16, where it is rounded by 0.8 %.
"""


@frozen
class Curve:
    """Loss and gradient norm of each step of a short run."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]


@frozen
class GradientDifference:
    """The difference of a weight's gradient in the first step between two runs."""

    weight: str  # as in `graph(model).weights`
    layer: str
    absolute: float  # largest difference of an element, on any rank that holds it
    scale: float  # largest element; if the rounding of weights changes elements by more, that, as `scale_of` says

    @property
    def relative(self) -> float:
        """Return the difference divided by the scale. Equal gradients of zero differ by 0."""
        return self.absolute / self.scale if self.scale else math.inf if self.absolute else 0.0


@frozen
class Comparison:
    """Two short runs and the tolerance for their difference.

    The tolerance is that of a loss or a gradient norm of 1; a larger one may differ in proportion. For gradients it is
    relative to the weight's own scale.
    """

    planned: Curve
    reference: Curve
    tolerance: float
    gradients: tuple[GradientDifference, ...] = ()  # in the order of the model
    without_dropout: tuple[str, ...] = ()  # nodes whose dropout was set to 0
    norm_noise: float = 0.0  # by how much rounding of weights changes the first gradient norm, as `norm_error` counts
    noise_margin: float = 0.0  # differences up to so many times that noise are rounding

    @property
    def curve_tolerance(self) -> float:
        """Return the tolerance of what follows from gradients: their norms, and losses after the first step.

        It exceeds `tolerance` where rounding of weights alone changes the norm by much, as in deep models with ReLU,
        whose gradient jumps at zero.
        """
        return max(self.tolerance, self.noise_margin * self.norm_noise)

    @property
    def loss_error(self) -> float:
        """Return the largest difference between two losses, divided by max(1, |reference loss|)."""
        return _largest_difference(self.planned.losses, self.reference.losses)

    @property
    def norm_error(self) -> float:
        """Return the largest difference between two gradient norms, divided by max(1, reference norm)."""
        return _largest_difference(self.planned.grad_norms, self.reference.grad_norms)

    @property
    def gradient_error(self) -> float:
        """Return the largest relative difference of a weight's gradient in the first step. NaN counts as infinite."""
        return max((math.inf if math.isnan(d.relative) else d.relative for d in self.gradients), default=0.0)

    @property
    def differing(self) -> tuple[GradientDifference, ...]:
        """Return the weights whose gradients differ by more than the tolerance, in the order of the model."""
        return tuple(d for d in self.gradients if not d.relative <= self.tolerance)

    @property
    def agrees(self) -> bool:
        """Return whether losses, norms and gradients are within their tolerances. NaN never is."""
        first = _largest_difference(self.planned.losses[:1], self.reference.losses[:1]) <= self.tolerance
        later = self.loss_error <= self.curve_tolerance and self.norm_error <= self.curve_tolerance
        return first and later and not self.differing


def _largest_difference(values: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest |value - reference| / max(1, |reference|) of the steps. NaN counts as infinite."""
    errors = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(values, reference, strict=True)]
    return max(math.inf if math.isnan(error) else error for error in errors)


def tolerance(precision: Precision) -> float:
    """Return the largest difference that rounding alone causes between two layouts in 3 steps, on this device."""
    if precision.narrow:
        return 5e-2  # scales are of the tensors that a device has: 3-bit mantissas are rounded at other values
    if precision is not Precision.FP32:
        return 1e-2  # sums of 8-bit mantissas in another order; up to 3e-3 measured on H200s at TP2 x PP2
    return 1e-4 if device.gpu_count() else 1e-5


def compare(
    plan: Plan,
    *,
    reference: Plan | None = None,
    steps: int = 3,
    seed: int = 1234,
    within: float | None = None,
    timeout: float | None = None,
    backend: Backend = Backend.AUTO,
) -> Comparison:
    """Compare a few steps under a plan and under a reference plan, by default one process with the same micro-batches.

    backend: of the layers under the plan. Those of the one process are computed by torch.

    First the gradient of each weight in the first step, then losses and gradient norms of all steps.

    Dropout of fused attention, whose masks depend on the layout, is set to 0, unless a reference is given. Raise
    UserError for dropout of experts. Other dropout stays.
    """
    plan, model = with_backend(plan, backend), planned_model(plan)
    check_plan(plan, model)
    check_trainable(plan, model)
    check_graph(graph(model))
    if steps < 1:
        raise UserError(f"--steps must be at least 1, got {steps}")
    check_host_memory(plan, "verify")
    dropping = () if reference or plan.layout.world == 1 else layout_dropout(model, plan.layout)
    with tempfile.TemporaryDirectory(prefix="megaloom-verify-") as folder:
        file = Path(folder) / "gradients.pt"
        planned = launcher.run(short_run, (plan, steps, seed, file, dropping), plan.layout, timeout=timeout)[0]
        its_backend = Backend.TE if plan.workload.precision.narrow else Backend.TORCH  # torch has no layers in fp8
        other = reference or with_backend(single_process(plan, model), its_backend)
        arguments = (other, steps, seed, file, dropping)
        expected, gradients, norm_noise = launcher.run(reference_run, arguments, other.layout, timeout=timeout)[0]
    precision = plan.workload.precision
    within = tolerance(precision) if within is None else within
    return Comparison(planned, expected, within, gradients, dropping, norm_noise, NOISE_MARGIN[precision])


def single_process(plan: Plan, model: Model) -> Plan:
    """Return the plan of one process with the micro-batches of `plan`, a single stage and no padding."""
    whole = Stage(
        rank=0,
        chunk=0,
        start=0,
        stop=len(graph(model).nodes),
        forward_seconds=sum(s.forward_seconds for s in plan.stages),
        backward_seconds=sum(s.backward_seconds for s in plan.stages),
        params=0,
    )
    return evolve(plan, layout=Layout(micro_batch=plan.layout.micro_batch, vocab_multiple=1), stages=(whole,))


@frozen(eq=False)
class ShortRun:
    """A few steps from initial weights on this rank, on random batches that do not depend on the layout."""

    engine: Engine
    seed: int

    @classmethod
    def of(cls, plan: Plan, model: Model, steps: int, seed: int) -> ShortRun:
        """Return a run whose optimizer does not amplify rounding noise."""
        from megaloom.runtime.engine.engine import Engine  # it imports megatron-core, which only ranks need

        return cls(Engine.build(plan, model, Recipe(steps=max(steps, 10), seed=seed, warmup=0, eps=EPS)), seed)

    def sample(self, step: int, i: int) -> Sample:
        """Return sample i of the global batch of a step."""
        engine = self.engine
        maker = SampleMaker.of(engine.graph, engine.plan.workload.seq, synthetic=True)
        i += step * engine.plan.workload.batch
        generator = torch.Generator().manual_seed(self.seed + i)
        text = torch.randint(maker.ids, (maker.length,), generator=generator)
        return engine.steps.data_step(maker, text, i, self.seed)

    def gradients(self) -> dict[str, WeightGradient] | None:
        """Return the gradients of the first step, on rank 0."""
        return self.engine.gradients(partial(self.sample, 0))

    def rounded_gradients(self) -> dict[str, WeightGradient] | None:
        """Return, on rank 0, the gradients of the first step with rounded weights."""
        with rounded_weights(self.engine.model_chunks):
            return self.gradients()

    def fed(self, step: int) -> Any:
        """Return what this rank passes to the engine in a step."""
        return partial(self.sample, step)

    def curve(self, steps: int, *, first: int = 0) -> Curve:
        """Train for a few steps, from number `first` on, and return their losses and gradient norms."""
        results = [self.engine.step(self.fed(step)) for step in range(first, first + steps)]
        return Curve(tuple(r.loss for r in results), tuple(r.grad_norm for r in results))

    def gradients_and_curve(self, steps: int) -> tuple[dict[str, WeightGradient] | None, Curve]:
        """Train for a few steps. Return the gradients of the first one, on rank 0, and the curve of all."""
        result, gradients = self.engine.step_with_gradients(self.fed(0))
        rest = self.curve(steps - 1, first=1)
        return gradients, Curve((result.loss, *rest.losses), (result.grad_norm, *rest.grad_norms))


def short_run(plan: Plan, steps: int, seed: int, file: Path | None = None, dropping: tuple[str, ...] = ()) -> Curve:
    """Train the plan's model for a few steps on this rank, on random tokens that do not depend on the layout.

    With a file, rank 0 writes the gradients of the first step into it. dropping: see `without_dropout`.
    """
    run = ShortRun.of(plan, without_dropout(planned_model(plan), dropping), steps, seed)
    if file is None:
        return run.curve(steps)
    gradients, curve = run.gradients_and_curve(steps)
    if gradients is not None:
        torch.save({name: (g.value, g.disagreement) for name, g in gradients.items()}, file)
    return curve


def reference_run(
    plan: Plan, steps: int, seed: int, file: Path, dropping: tuple[str, ...]
) -> tuple[Curve, tuple[GradientDifference, ...], float]:
    """Train as `short_run` does, and return its curve, the differences of gradients from a file, and the norm's noise.

    Rank 0 has the differences. The noise is by how much rounding of weights changes the gradient norm of the first
    step, divided by max(1, norm).
    """
    run = ShortRun.of(plan, without_dropout(planned_model(plan), dropping), steps, seed)
    rounded = run.rounded_gradients()
    expected, curve = run.gradients_and_curve(steps)
    differences: tuple[GradientDifference, ...] = ()
    norm_noise = 0.0
    if expected is not None and rounded is not None:
        values, precision = {name: g.value for name, g in expected.items()}, plan.workload.precision
        noise = noise_of_alike(rounding_noise(expected, rounded), values)
        differences = gradient_differences(run.engine.graph, torch.load(file), values, noise, precision)
        norm_noise = _largest_difference([_norm(g.value for g in rounded.values())], [_norm(values.values())])
    return curve, differences, norm_noise


def rounding_noise(gradients: Mapping[str, WeightGradient], rounded: Mapping[str, WeightGradient]) -> dict[str, float]:
    """Return by how much an element of each gradient changes if weights are rounded."""
    return {name: _largest(g.value - gradients[name].value) for name, g in rounded.items()}


def noise_of_alike(noise: Mapping[str, float], gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the noise of each gradient, relative to its largest element at least that of alike ones.

    The same weight of other layers has a name that differs in numbers only. A kink, such as that of ReLU at zero,
    changes one unit of a few layers by much, and rounding decides in which layers.
    """
    largest = {name: _largest(gradient) for name, gradient in gradients.items()}
    kinds = {name: re.sub(r"\d+", "*", name) for name in noise}
    relative: dict[str, float] = {}
    for name, kind in kinds.items():
        if largest[name]:
            relative[kind] = max(relative.get(kind, 0.0), min(1.0, noise[name] / largest[name]))
    return {name: max(noise[name], relative.get(kind, 0.0) * largest[name]) for name, kind in kinds.items()}


def gradient_differences(
    graph: Graph,
    planned: Mapping[str, tuple[Tensor, float]],
    expected: Mapping[str, Tensor],
    noise: Mapping[str, float],
    precision: Precision,
) -> tuple[GradientDifference, ...]:
    """Return the difference of each gradient, in the order of the model.

    planned: gradients, and by how much ranks disagree on an element. noise: by how much the rounding of weights changes
    an element. Raise UserError unless both have the same weights.
    """
    if planned.keys() != expected.keys():
        raise UserError(f"only one run has the gradients of {', '.join(sorted(planned.keys() ^ expected.keys()))}")
    layers = {slot.name: f"{n.name} ({type(n.op).__name__})" for n in reversed(graph.nodes) for slot in n.weights}
    return tuple(
        GradientDifference(
            name,
            layers[name],
            _largest(value - expected[name]) + disagreement,
            scale_of(expected[name], noise[name], precision),
        )
        for name, (value, disagreement) in planned.items()
    )


def scale_of(expected: Tensor, noise: float, precision: Precision) -> float:
    """Return what the difference of a gradient is divided by: its largest element, or NOISE_MARGIN · noise / tolerance.

    Some gradients are nothing but rounding noise: that of a key bias is zero, because a softmax ignores what is added
    to all scores. Two correct layouts have different noise, which stays below NOISE_MARGIN times the measured one.
    """
    return max(_largest(expected), NOISE_MARGIN[precision] * noise / tolerance(precision))


def _norm(gradients: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients))


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


@contextmanager
@torch.no_grad()
def rounded_weights(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Round each weight to a neighbouring number inside the context: up or down, as its own digits decide."""
    saved = [(p, p.clone()) for chunk in chunks for p in chunk.parameters()]
    for p, _ in saved:
        p.mul_(1 + torch.finfo(p.dtype).eps * torch.sin(1e4 * p.float()).sign())
    try:
        yield
    finally:
        for p, value in saved:
            p.copy_(value)
