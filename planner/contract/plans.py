"""The plan: a layout, the cut of the graph into stages, and what is predicted of them. A value; JSON on disk.

Protocol: `loads(dumps(plan), …) == plan`, exactly. What cannot be a plan of this version is a PlanError that names the
field; `check` refuses another model than the one that was planned.
"""

from __future__ import annotations

import json
import os
import tempfile
from math import inf
from pathlib import Path
from typing import NoReturn

from attrs import asdict, frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Model, graph
from megaloom.dsl.json_form import fingerprint, is_current
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.rules.rules import violations

from .layout import Layout, layout_to_json
from .workload import Runtime, Workload

VERSION = 8  # 8: shard in place of distributed_optimizer; 7: what overlaps; 6: what runs it; 5: within what a step should stay; 4: when each rank is the fullest
ROUNDING = 1e-9  # of a step, by which the sum of its parts may be off


class PlanError(UserError):
    """A plan that cannot be used: corrupt, foreign, of another version, or of another model."""


@frozen(kw_only=True)
class Stage:
    """One chunk of the model on one pipeline rank: the nodes [start, stop) of `graph(model)`, in its order."""

    rank: int  # pipeline rank
    chunk: int  # which of the vpp chunks on that rank
    start: int
    stop: int
    forward_seconds: float  # one micro-batch
    backward_seconds: float
    params: int  # elements on one device


@frozen(kw_only=True)
class Prediction:
    """What one optimizer step is predicted to take; the parts of `breakdown` add up to `step_seconds`."""

    step_seconds: float
    within: tuple[float, float]  # seconds at the least and at the most, nine times of ten
    tokens_per_second_per_device: float
    flops_per_second_per_device: float  # model FLOPs (no recompute, causal attention counted half)
    mfu: float
    bubble: float  # share of the step that a pipeline rank waits
    breakdown: dict[str, float]  # seconds by cause
    nbytes: tuple[dict[str, int], ...]  # for each pipeline rank, peak memory by what holds it
    moments: tuple[str, ...]  # and when that is


@frozen(kw_only=True)
class Plan:
    """The only thing the runtime needs. `stages` are in model order: stage i is chunk i // pp of rank i % pp."""

    version: int
    model: str  # where to find it: "megaloom.examples.gpt2:gpt2" or "/path/file.py:name"
    fingerprint: str  # of the model that was planned; the runtime refuses another
    cluster: Cluster
    workload: Workload
    layout: Layout
    stages: tuple[Stage, ...]
    predicted: Prediction
    reasons: tuple[str, ...]  # why this layout, in sentences
    runtime: Runtime = Runtime.MEGALOOM  # what it is predicted for


def check(plan: Plan, model: Model) -> None:
    """Nothing, when `model` is the one that was planned and can have such a plan. Raises PlanError otherwise."""
    found = fingerprint(model)
    if not is_current(plan.fingerprint):
        raise PlanError(
            f"the plan was made by another version of megaloom, which identified models differently "
            f"(fingerprint {plan.fingerprint}, now {found})\nmake it again: {again(plan)}"
        )
    if found != plan.fingerprint:
        raise PlanError(
            f"the plan is for another model: {plan.model} had fingerprint {plan.fingerprint}, "
            f"{model.name!r} has {found}\nit changed since; plan it again: {again(plan)}"
        )
    g = graph(model)
    for wrong in violations(plan.layout, g, plan.workload, plan.cluster):
        raise PlanError(f"the plan is not legal: {wrong}\nmend that, or plan it again: {again(plan)}")
    inner = [stage.stop for stage in plan.stages[:-1]]
    if plan.stages[-1].stop != len(g.nodes) or not {*inner} <= {*g.cut_points}:
        raise PlanError(
            f"the plan's stages, nodes 0 to {', '.join(str(stage.stop) for stage in plan.stages)}, are no cut of the "
            f"{len(g.nodes)} nodes of {plan.model}\nplan it again: {again(plan)}"
        )


def again(plan: Plan) -> str:
    """The command that makes such a plan anew."""
    w, runs = plan.workload, "" if plan.runtime is Runtime.MEGALOOM else f" --runtime {plan.runtime}"
    return f"plan {plan.model} --gpus {plan.cluster} --seq {w.seq} --batch {w.batch} --precision {w.precision}{runs}"


def dumps(plan: Plan) -> str:
    """The plan as JSON."""
    raw = asdict(plan) | {"layout": layout_to_json(plan.layout)}
    return json.dumps(raw, indent=1, allow_nan=False) + "\n"


def loads(text: str, where: str) -> Plan:
    """The plan that this JSON holds. `where` names its place in errors. Raises PlanError."""
    from .structured import StructureError, structured  # with cattrs, which who only writes plans need not wait for

    try:
        raw = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{where} is not JSON: {error}\na plan is what `plan MODEL -o {where}` writes") from None
    if not isinstance(raw, dict) or "version" not in raw or "stages" not in raw:
        raise PlanError(f"{where} is JSON, but not a plan\na plan is what `plan MODEL -o {where}` writes")
    if raw["version"] != VERSION or isinstance(raw["version"], bool):
        raise PlanError(
            f"{where} is a plan of version {raw['version']!r}; this megaloom reads version {VERSION}\n"
            f"plan {raw.get('model', 'MODEL')!s} again"
        )
    try:
        plan = structured(raw, Plan)
    except StructureError as wrong:
        _refuse(where, wrong.path, wrong.what)
    _consistent(plan, where)
    return plan


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the plan, whole or not at all. Raises UserError where it cannot be written."""
    target = Path(os.path.realpath(path))  # what a link stands for, not the link
    try:
        if Path(path).exists() and not target.is_file():  # such as /dev/stdout, which no file can take the place of
            Path(path).write_text(dumps(plan), encoding="utf-8")
            return
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=target.parent, prefix=f".{target.name}.", delete=False
        ) as file:
            try:
                file.write(dumps(plan))
                file.flush()
                os.fsync(file.fileno())
                os.chmod(file.name, 0o666 & ~_umask())
                os.replace(file.name, target)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise UserError(
            f"cannot write the plan to {path}: {error.strerror}\ngive another path, in a directory that exists"
        ) from None


def load(path: str | os.PathLike[str]) -> Plan:
    """The plan in this file. Raises PlanError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise PlanError(f"{path} is not text, so not a plan\na plan is what `plan MODEL -o {path}` writes") from None
    except OSError as error:
        raise PlanError(f"cannot read a plan from {path}: {error.strerror}\n`plan MODEL -o {path}` makes one") from None
    return loads(text, str(path))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number that a plan can hold")


def _refuse(where: str, path: str, what: str) -> NoReturn:
    field = f"{path or 'the plan'} {what}".replace(" : ", ": ")
    raise PlanError(f"{where} is damaged: {field}\nplan again, or mend that field")


def _consistent(plan: Plan, where: str) -> None:
    """Refuse what every field allows but no plan is: stages that leave nodes out, a world that is not the cluster."""
    layout, stages = plan.layout, plan.stages
    for axis, degree in layout.degrees.items():
        if degree < 1:
            _refuse(where, f"layout.{axis}", f"is {degree}: it is at least 1")
    for name, amount in (("seq", plan.workload.seq), ("batch", plan.workload.batch)):
        if amount < 1:
            _refuse(where, f"workload.{name}", f"is {amount}: it is at least 1")
    if layout.world != plan.cluster.count:
        _refuse(where, "layout", f"takes {layout.world} devices, and the cluster has {plan.cluster.count}")
    if len(stages) != layout.pp * layout.vpp:
        _refuse(where, "stages", f"are {len(stages)}, and pp {layout.pp} x vpp {layout.vpp} is another number")
    for name, held in (("nbytes", plan.predicted.nbytes), ("moments", plan.predicted.moments)):
        if len(held) != layout.pp:
            _refuse(where, f"predicted.{name}", f"has {len(held)} ranks, and pp is {layout.pp}")
    for i, stage in enumerate(stages):
        if (stage.chunk, stage.rank) != divmod(i, layout.pp):
            _refuse(where, f"stages[{i}]", f"is chunk {stage.chunk} of rank {stage.rank}, out of model order")
        if not (stages[i - 1].stop if i else 0) == stage.start < stage.stop:
            _refuse(where, f"stages[{i}]", f"is nodes {stage.start} to {stage.stop}, not what follows the stage before")
    _adds_up(plan, where)


def _adds_up(plan: Plan, where: str) -> None:
    """Refuse predictions that are none: nothing or less, or a step that is not the sum of its parts."""
    said = plan.predicted
    step, parts = said.step_seconds, sum(said.breakdown.values())
    if not 0 < step < inf:
        _refuse(where, "predicted.step_seconds", f"is {step:g}: it is more than 0")
    if min(said.breakdown.values(), default=0.0) < 0 or not abs(parts - step) <= ROUNDING * step:
        _refuse(where, "predicted.breakdown", f"is {parts:g} s in all, not the parts of {step:g}")
    for rank, held in enumerate(said.nbytes):
        if min(held.values(), default=0) < 0 or not any(held.values()):
            _refuse(where, f"predicted.nbytes[{rank}]", "is nothing, or less")
    for i, stage in enumerate(plan.stages):
        if not min(stage.forward_seconds, stage.backward_seconds, stage.params) >= 0:
            _refuse(where, f"stages[{i}]", "takes less than nothing")
