"""A plan of Megaloom as a run: its model, layout, workload and cluster, with the lines of plan.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.layout import FIELDS, LEFT_OUT_OF_PLANS, Layout, flag_of, switch
from megaloom.planner.contract.plan_json import layout_to_json, plan_from_json
from megaloom.planner.contract.planned_model import planned_model
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Runtime
from megaloom.planner.cost.profiles.frameworks import PROFILES
from megaloom.planner.rules.plan_check import check_plan

from .run import Devices, Edit, Stated, TrainingRun
from .words import Origin, Word

RUNTIME_NAMES = {Runtime.MEGALOOM: "Megaloom", Runtime.MEGATRON: "Megatron-core"}
LEFT_OUT = frozenset({"recompute_modules", "recompute_layers", "microbatch_group", "reshard", "replicas"})
"""Fields of a layout that are shown only where they are not the default."""


def is_own_plan(text: str) -> bool:
    """Return whether a text is a plan of this program."""
    if not text.lstrip().startswith("{"):
        return False
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and {"layout", "stages", "predicted"} <= data.keys()


def plan_run(text: str, path: str) -> TrainingRun:
    """Return the run of a plan. Raise PlanError for a damaged or illegal plan, and for one of another model."""
    plan = plan_from_json(text, path)
    model = planned_model(plan)
    check_plan(plan, model)
    return TrainingRun(
        path=path,
        program=RUNTIME_NAMES[plan.runtime],
        version="",
        model=model,
        layout=plan.layout,
        workload=plan.workload,
        stages=tuple(stage.start for stage in plan.stages),
        profile=PROFILES[plan.runtime],
        devices=Devices(plan.cluster.count),
        stated=_stated(plan, _lines(text, path)),
        edits=partial(_edits, plan.layout, _lines(text, path)),
        own=plan,
    )


def refuse_patch(run: TrainingRun) -> None:
    """Raise UserError for a run that is a plan, which is planned again rather than patched."""
    if run.own is not None:
        raise UserError(f"{run.path} is a plan, which is not patched\nplan again with these options")


def _lines(text: str, path: str) -> Mapping[str, Origin]:
    """Return the line of each field of the plan's layout and workload, by the field's name."""
    found: dict[str, Origin] = {}
    for number, line in enumerate(text.splitlines(), 1):
        name = line.strip().partition('":')[0].removeprefix('"')
        if name in ("model", "seq", "batch", "precision") or name in FIELDS:
            found.setdefault(name, Origin(path, number))
    return found


def _stated(plan: Plan, lines: Mapping[str, Origin]) -> tuple[Stated, ...]:
    def row(group: str, name: str, value: object, title: str = "") -> Stated:
        return Stated(group, title or name.replace("_", " "), str(value), lines.get(name))

    out = [row("model", "model", plan.model, "declared as")]
    if plan.lora is not None:
        out.append(Stated("model", "adapters", f"LoRA of rank {plan.lora.rank}"))
    out.append(Stated("layout", "GPUs", str(plan.layout.world)))
    out += [row("layout", name, value) for name, value in _shown(plan.layout).items()]
    work = plan.workload
    rows = {"seq": work.seq, "batch": work.batch, "precision": work.precision}
    return (*out, *(row("workload", name, value) for name, value in rows.items()))


def _shown(x: Layout) -> dict[str, str]:
    usual = layout_to_json(Layout())
    return {
        name: _text(value)
        for name, value in layout_to_json(x).items()
        if name not in LEFT_OUT or value != usual.get(name)
    }


def _text(value: int | str | list[str]) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ",".join(value) or "none" if isinstance(value, list) else str(value)


def _edits(own: Layout, lines: Mapping[str, Origin], plan: Plan) -> tuple[Edit, ...]:
    """Return the options of `plan` that make the layout that of another plan."""
    old, new = layout_to_json(own), layout_to_json(plan.layout)
    edits = []
    for name in FIELDS:
        value, before = (held.get(name, str(LEFT_OUT_OF_PLANS.get(name, ""))) for held in (new, old))
        follows = name == "dp" or (name == "recompute_layers" and not plan.layout.full_recompute)
        if value == before or follows:
            continue
        at = lines.get(name, Origin("", 1))
        words = (switch(name, value),) if isinstance(value, bool) else (flag_of(name), _text(value))
        edits.append(Edit(flag_of(name), words, (Word(flag_of(name), at), Word(_text(before), at))))
    return tuple(edits)
