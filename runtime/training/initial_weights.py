"""The initial weights of a run, which `--from` names: a Hugging Face folder, or a checkpoint of Megatron-LM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megaloom.dsl.catalog import config_of
from megaloom.dsl.graph import Model
from megaloom.planner.contract.plans import Plan
from megaloom.runtime.launch.agreement import gathered
from megaloom.runtime.optimizer.fine_tuning import fine_tuning_note
from megaloom.runtime.optimizer.recipe import Recipe
from megaloom.runtime.weights.given import GivenWeights, is_megatron, open_folder
from megaloom.runtime.weights.tensor_folder import has_tensors

if TYPE_CHECKING:
    from megaloom.runtime.convert.megatron_weights import MegatronWeights


def open_weights(folder: Path) -> GivenWeights | MegatronWeights:
    """Open a folder with weights. Raise UserError if they cannot be read."""
    if not is_megatron(folder):
        return open_folder(folder)
    from megaloom.runtime.convert.megatron_weights import MegatronWeights  # imports megatron-core

    return MegatronWeights(folder)


def starting_notes(
    plan: Plan, model: Model, given: GivenWeights | MegatronWeights | None, recipe: Recipe
) -> Iterator[str]:
    """Yield lines about the weights that a run starts from at step 0. recipe: as the command gives it."""
    config = config_of(plan.model)
    if given:
        yield f"weights from {given}; the optimizer is fresh, and training starts at step 0"
        yield from given.notes(model)
        yield fine_tuning_note(recipe, model)
    elif model.lora:
        yield "the frozen weights are random: give trained ones with --from FOLDER"
    elif config and has_tensors(config.parent):
        yield f"the weights are random: --from {config.parent} would start from those in the folder"


def not_finite_note(given: GivenWeights | MegatronWeights) -> str | None:
    """Return a line that names the tensors of which a rank has read NaN or an infinite value. Every rank calls it."""
    own = sorted(given.files.not_finite) if isinstance(given, GivenWeights) else []
    names = sorted({name for each in gathered(own) for name in each})
    if not names:
        return None
    more = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
    return f"--from has NaN or infinite values in {', '.join(names[:3])}{more}: losses may not be finite"
