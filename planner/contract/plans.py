"""The plan: a layout, its stages, and the prediction for them. A value, stored as JSON.

`plan_from_json(plan_to_json(plan), where) == plan` holds exactly. `load` and `save` are the same on files. A file that
is no valid plan of this version raises a PlanError that names the field. `rules.plan_check` compares plan and model.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from attrs import Factory, asdict, frozen

from megaloom.dsl.errors import UserError

from .capability import Environment, assumed_environment
from .devices import Cluster
from .layout import Layout, layout_to_json
from .workload import Runtime, Workload

# 8: interval for within, shard for distributed_optimizer, and the environment; 7: overlaps; 6: runtime; 5: interval;
# 4: the moment of each rank's peak memory.
PLAN_VERSION = 8


class PlanError(UserError):
    """A plan that cannot be used: damaged, of another version, or of another model."""


@frozen(kw_only=True)
class Stage:
    """One model chunk on one pipeline rank: the nodes [start, stop) of `graph(model)`, in program order."""

    rank: int  # pipeline rank
    chunk: int  # number of this chunk on its rank, below vpp
    start: int
    stop: int
    forward_seconds: float  # one micro-batch
    backward_seconds: float
    params: int  # elements on one device


@frozen(kw_only=True)
class Prediction:
    """Predicted time and memory of one optimizer step. The parts of `breakdown` add up to `step_seconds`."""

    step_seconds: float
    interval: tuple[float, float]  # seconds between which nine of ten measured steps lie
    tokens_per_second_per_device: float
    flops_per_second_per_device: float  # model FLOPs: no recompute, causal attention counted half
    mfu: float
    bubble: float  # share of the step in which a pipeline rank waits
    breakdown: dict[str, float]  # seconds by cause
    nbytes: tuple[dict[str, int], ...]  # peak memory of each pipeline rank, by holder
    moments: tuple[str, ...]  # the moment of each pipeline rank's peak


@frozen(kw_only=True)
class Plan:
    """Everything that the runtime needs. Stages are in model order: stage i is chunk i // pp of rank i % pp."""

    version: int
    model: str  # where it is declared: "megaloom.examples.gpt2:gpt2" or "/path/file.py:name"
    fingerprint: str  # of the model's graph; the runtime refuses another one
    cluster: Cluster
    workload: Workload
    layout: Layout
    stages: tuple[Stage, ...]
    predicted: Prediction
    reasons: tuple[str, ...]  # why this layout, in sentences
    runtime: Runtime = Runtime.MEGALOOM  # the program that the prediction is for
    environment: Environment = Factory(
        lambda self: assumed_environment(self.runtime, self.cluster.device.name), takes_self=True
    )


def plan_command(plan: Plan) -> str:
    """Return the command that makes a plan for the model, cluster and workload of this one."""
    w, runtime = plan.workload, "" if plan.runtime is Runtime.MEGALOOM else f" --runtime {plan.runtime}"
    return f"plan {plan.model} --gpus {plan.cluster} --seq {w.seq} --batch {w.batch} --precision {w.precision}{runtime}"


def plan_to_json(plan: Plan) -> str:
    """Return the plan as JSON text."""
    raw = asdict(plan) | {"layout": layout_to_json(plan.layout)}
    return json.dumps(raw, indent=1, allow_nan=False) + "\n"


def plan_from_json(text: str, where: str) -> Plan:
    """Return the plan in this JSON text; `where` is its file, for errors. Raises PlanError."""
    from .plan_validation import validate_plan  # imports cattrs, for which a program that only writes need not wait
    from .structured import StructureError, structured

    advice = f"`plan MODEL -o {where}` writes a plan"
    try:
        raw = json.loads(text.removeprefix("\ufeff"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{where} is not JSON: {error}\n{advice}") from None
    if not isinstance(raw, dict) or "version" not in raw or "stages" not in raw:
        raise PlanError(f"{where} is JSON, but not a plan\n{advice}")
    if raw["version"] != PLAN_VERSION or isinstance(raw["version"], bool):
        raise PlanError(
            f"{where} is a plan of version {raw['version']!r}; this megaloom reads version {PLAN_VERSION}\n"
            f"plan again: {_command_of(raw, where)}"
        )
    try:
        plan = structured(raw, Plan)
        validate_plan(plan)
    except StructureError as wrong:
        raise PlanError(f"{where} is damaged: {wrong}\ncorrect that field, or plan again") from None
    return plan


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan to a file, whole or not at all. Raises UserError where it cannot be written."""
    target = Path(os.path.realpath(path))  # the target of a link, not the link
    try:
        if Path(path).exists() and not target.is_file():  # such as /dev/stdout, which cannot be replaced
            Path(path).write_text(plan_to_json(plan), encoding="utf-8")
            return
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=target.parent, prefix=f".{target.name}.", delete=False
        ) as file:
            try:
                file.write(plan_to_json(plan))
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
    """Return the plan in a file. Raises PlanError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise PlanError(f"{path} is not text, so not a plan\n`plan MODEL -o {path}` writes a plan") from None
    except OSError as error:
        raise PlanError(
            f"cannot read a plan from {path}: {error.strerror}\n`plan MODEL -o {path}` writes a plan"
        ) from None
    return plan_from_json(text, str(path))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"a plan cannot hold {name}")


def _command_of(raw: dict[str, Any], where: str) -> str:
    """Return the command that makes a plan of another version anew, as far as its fields tell."""
    try:
        w, cluster = raw["workload"], raw["cluster"]
        kind = cluster["source"] or cluster["device"]["name"]
        options = f"--gpus {cluster['count']}x{kind} --seq {w['seq']} --batch {w['batch']} --precision {w['precision']}"
    except (KeyError, TypeError):
        options = "--gpus …"
    return f"plan {raw.get('model', 'MODEL')} {options} -o {where}"
