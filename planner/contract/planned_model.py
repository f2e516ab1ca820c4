"""The model of a plan: the one that is declared where the plan says, with the plan's adapters."""

from __future__ import annotations

from megaloom.dsl.catalog import find
from megaloom.dsl.graph import Model
from megaloom.dsl.transforms.adapters import adapted

from .plans import Plan


def planned_model(plan: Plan) -> Model:
    """Return the model that a plan is for. Raises UserError if it is not found.

    The model.json of a run has the adapters already.
    """
    model, _ = find(plan.model)
    return model if plan.lora is None or model.lora is not None else adapted(model, plan.lora)
