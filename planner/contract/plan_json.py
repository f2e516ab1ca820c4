"""Plans as JSON text and as files.

`plan_from_json(plan_to_json(plan), where) == plan` holds exactly. `load` reads a file, `save` writes one. A file that
is no valid plan of this version raises a PlanError that names the field. `rules.plan_check` compares plan and model.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from attrs import asdict

from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_file import parse_json, read_text
from megaloom.dsl.quoting import shell_word

from .choices import GradReduce, Reshard
from .layout import FIELDS, LEFT_OUT_OF_PLANS, Layout
from .plans import PLAN_VERSION, Plan, PlanError


def plan_to_json(plan: Plan) -> str:
    """Return the plan as JSON text."""
    raw = asdict(plan) | {"layout": layout_to_json(plan.layout)}
    return json.dumps(raw, indent=1, allow_nan=False) + "\n"


def layout_to_json(layout: Layout) -> dict[str, int | str | list[str]]:
    """Return the fields of a layout as JSON has them, without those of `LEFT_OUT_OF_PLANS`."""
    values = {name: getattr(layout, name) for name in FIELDS}
    return {name: FIELDS[name].plain(x) for name, x in values.items() if x != LEFT_OUT_OF_PLANS.get(name)}


def plan_from_json(text: str, where: str) -> Plan:
    """Return the plan in this JSON text; `where` is its file, for errors. Raises PlanError."""
    from .plan_validation import validate_plan  # imports cattrs, for which a program that only writes need not wait
    from .structured import StructureError, structured

    advice = _advice(where)
    try:
        raw = parse_json(text.removeprefix("\ufeff"), parse_constant=_no_constant)
    except ValueError as error:
        raise PlanError(f"{where} is not JSON: {error}\n{advice}") from None
    if not isinstance(raw, dict) or "version" not in raw or "stages" not in raw:
        raise PlanError(f"{where} is JSON, but not a plan\n{advice}")
    if raw["version"] == 8 and isinstance(raw.get("layout"), dict):  # it padded the vocabulary no further than needed
        raw = raw | {"version": 9, "layout": {**raw["layout"], "vocab_multiple": 1}}
    if raw["version"] == 9:
        raw = raw | {"version": 10, "lora": None}
    if raw["version"] == 10 and isinstance(raw.get("layout"), dict):
        raw = raw | {"version": 11, "layout": {**raw["layout"], "grad_reduce": str(GradReduce.FP32)}}
    if raw["version"] == 11 and isinstance(raw.get("layout"), dict):
        added = {"reshard": str(Reshard.MICRO_BATCH), "replicas": 1}
        raw = raw | {"version": 12, "layout": {**raw["layout"], **added}}
    if raw["version"] == 12 and all(isinstance(raw.get(part), dict) for part in ("cluster", "predicted")):
        unknown = {"nbytes_high": None, "overflow": None}
        raw = raw | {"cluster": {"calibration": None, **raw["cluster"]}, "predicted": {**unknown, **raw["predicted"]}}
        raw = raw | {"version": PLAN_VERSION}
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
        text = read_text(path)
    except UnicodeDecodeError:
        raise PlanError(f"{path} is not text, so not a plan\n{_advice(str(path))}") from None
    except OSError as error:
        raise PlanError(f"cannot read a plan from {path}: {error.strerror}\n{_advice(str(path))}") from None
    return plan_from_json(text, str(path))


def _advice(path: str) -> str:
    """Return the command that writes a plan to a path; to plan.json if another file is there, or it has another ending.

    A command that is copied must not write over a file that is no plan.
    """
    free = path.endswith(".json") and not os.path.exists(path)
    return f"`plan MODEL -o {path}` writes a plan" if free else "`plan MODEL` writes plan.json"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"a plan cannot hold {name}")


def _command_of(raw: dict[str, Any], where: str) -> str:
    """Return the `plan` command that replaces a plan of another version, with the options that its fields give."""
    try:
        w, cluster = raw["workload"], raw["cluster"]
        kind = cluster["source"] or cluster["device"]["name"]
        load = {"gpus": f"{cluster['count']}x{kind}", **{name: w[name] for name in ("seq", "batch", "precision")}}
        options = " ".join(f"--{name} {shell_word(str(value))}" for name, value in load.items())
    except (KeyError, TypeError):
        options = "--gpus …"
    return f"plan {shell_word(str(raw.get('model', 'MODEL')))} {options} -o {shell_word(where)}"
