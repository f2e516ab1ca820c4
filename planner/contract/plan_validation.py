"""Consistency of the fields of a plan with each other, for plans that were read from a file.

`validate_plan` raises a StructureError with the path of the first wrong field. Types are checked by `structured`.
"""

from __future__ import annotations

from math import inf, isclose, isfinite
from typing import NoReturn

from .known_devices import MEMORY
from .layout import FIELDS
from .plans import Plan
from .structured import StructureError
from .workload import Precision

ROUNDING_ERROR = 1e-9  # of a step, by which the sum of its parts may differ from it
MEMORY_HOLDERS = ("weights", "gradients", "optimizer", "activations", "workspace", "logits", "allocator", "runtime")
"""Holders of memory that every prediction has."""

LARGEST_MEMORY = 2**43  # bytes of one device, as in `devices.Device`


def validate_plan(plan: Plan) -> None:
    """Raise StructureError for a plan that no search makes."""
    _validate_amounts(plan)
    _validate_device(plan)
    _validate_stages(plan)
    _validate_prediction(plan)


def _refuse(path: str, what: str) -> NoReturn:
    raise StructureError(path, what)


def _validate_amounts(plan: Plan) -> None:
    for name, spec in FIELDS.items():
        if (value := getattr(plan.layout, name)) < spec.minimum:
            _refuse(f"layout.{name}", f"must be at least {spec.minimum}, got {value}")
    for name, amount in (("seq", plan.workload.seq), ("batch", plan.workload.batch)):
        if amount < 1:
            _refuse(f"workload.{name}", f"must be at least 1, got {amount}")
    if plan.layout.world != plan.cluster.count:
        _refuse("layout", f"uses {plan.layout.world} devices, but cluster.count is {plan.cluster.count}")


def _validate_device(plan: Plan) -> None:
    device = plan.cluster.device
    if device.name not in MEMORY and not plan.cluster.source:
        _refuse("cluster.device.name", f"must be one of {', '.join(MEMORY)}; got {device.name!r}")
    for name in device.flops:
        if name not in list(Precision):
            _refuse("cluster.device.flops", f"must have names among {', '.join(Precision)}; got {name!r}")


def _validate_stages(plan: Plan) -> None:
    layout, stages = plan.layout, plan.stages
    if len(stages) != layout.pp * layout.vpp:
        _refuse("stages", f"must be pp {layout.pp} x vpp {layout.vpp} = {layout.pp * layout.vpp}, got {len(stages)}")
    for i, stage in enumerate(stages):
        chunk, rank = divmod(i, layout.pp)
        if (stage.chunk, stage.rank) != (chunk, rank):
            _refuse(f"stages[{i}]", f"must be chunk {chunk} of rank {rank}, got chunk {stage.chunk} of {stage.rank}")
        start = stages[i - 1].stop if i else 0
        if not start == stage.start < stage.stop:
            _refuse(f"stages[{i}]", f"must begin at node {start} and not be empty, got [{stage.start}, {stage.stop})")
        for name in ("forward_seconds", "backward_seconds", "params"):
            if not 0 <= (value := getattr(stage, name)) < inf:
                _refuse(f"stages[{i}].{name}", f"must be at least 0, got {value:g}")
        if stage.params > LARGEST_MEMORY:
            _refuse(f"stages[{i}].params", f"must be at most {LARGEST_MEMORY} elements, got {stage.params}")


def _validate_prediction(plan: Plan) -> None:
    predicted, ranks = plan.predicted, plan.layout.pp
    step, low, high = predicted.step_seconds, *predicted.interval
    if not 0 < step < inf:
        _refuse("predicted.step_seconds", f"must be more than 0, got {step:g}")
    for name in ("tokens_per_second_per_device", "flops_per_second_per_device", "mfu", "bubble"):
        value = getattr(predicted, name)
        if value is not None and (value < 0 or not isfinite(value)):
            _refuse(f"predicted.{name}", f"must be at least 0, got {value:g}")
    for cause, seconds in predicted.breakdown.items():
        if seconds < 0:
            _refuse(f"predicted.breakdown[{cause!r}]", f"must be at least 0, got {seconds:g}")
    if not abs((parts := sum(predicted.breakdown.values())) - step) <= ROUNDING_ERROR * step:
        _refuse("predicted.breakdown", f"must add up to step_seconds, {step:g}; its sum is {parts:g}")
    if not 0 < low <= step <= high < inf:
        what = f"must be two times in seconds, around step_seconds = {step:g}; got {low:g} and {high:g}"
        _refuse("predicted.interval", what)
    _validate_speed(plan)
    if predicted.overflow is not None and not 0 <= predicted.overflow <= 1:
        _refuse("predicted.overflow", f"must be a chance from 0 to 1, got {predicted.overflow:g}")
    if predicted.nbytes_high is not None and not 0 < predicted.nbytes_high <= 2 * LARGEST_MEMORY:
        _refuse("predicted.nbytes_high", f"must be a number of bytes, got {predicted.nbytes_high:g}")
    for name in ("nbytes", "moments"):
        if len(getattr(predicted, name)) != ranks:
            _refuse(f"predicted.{name}", f"must have an entry for each of pp {ranks} pipeline ranks")
    for rank, held in enumerate(predicted.nbytes):
        if absent := [name for name in MEMORY_HOLDERS if name not in held]:
            _refuse(f"predicted.nbytes[{rank}]", f"must have {', '.join(absent)}")
        if min(held.values(), default=0) < 0 or not any(held.values()):
            _refuse(f"predicted.nbytes[{rank}]", "must hold at least one byte, and no negative number")
        if (total := sum(held.values())) > LARGEST_MEMORY:
            _refuse(f"predicted.nbytes[{rank}]", f"must be at most {LARGEST_MEMORY} bytes, got {total}")


def _validate_speed(plan: Plan) -> None:
    """Compare the speed of a prediction with its step, workload and device."""
    predicted, w, device = plan.predicted, plan.workload, plan.cluster.device
    flops, mfu, step = predicted.flops_per_second_per_device, predicted.mfu, predicted.step_seconds
    if predicted.bubble > 1:
        _refuse("predicted.bubble", f"must be a share of the step, at most 1, got {predicted.bubble:g}")
    if mfu > 1:
        _refuse("predicted.mfu", f"must be a share of the device's peak, at most 1, got {mfu:g}")
    due = w.tokens / step / plan.cluster.count
    if not isclose(got := predicted.tokens_per_second_per_device, due, rel_tol=ROUNDING_ERROR):
        what = f"must be seq x batch / step_seconds / devices = {due:g}, got {got:g}"
        _refuse("predicted.tokens_per_second_per_device", what)
    peak = device.flops.get(w.precision)
    if peak is None:
        _refuse("cluster.device.flops", f"must have the workload's precision, {w.precision}")
    if not isclose(mfu, flops / peak, rel_tol=ROUNDING_ERROR):
        _refuse("predicted.mfu", f"must be flops_per_second_per_device / {peak:g} = {flops / peak:g}, got {mfu:g}")
