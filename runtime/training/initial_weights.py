"""The initial weights of a run, which `--from` names: of another run, a Hugging Face folder or Megatron-LM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from megaloom.dsl.catalog import config_of
from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Model
from megaloom.planner.contract.plans import Plan
from megaloom.runtime.checkpoints.checkpoint_folder import Checkpoint, newest_intact
from megaloom.runtime.launch.agreement import gathered
from megaloom.runtime.modules.initial_weights import GivenValues
from megaloom.runtime.optimizer.fine_tuning import fine_tuning_note
from megaloom.runtime.optimizer.recipe import Recipe
from megaloom.runtime.weights.hugging_face_files import CONFIG, HF_FOLDER
from megaloom.runtime.weights.hugging_face_weights import HuggingFaceWeights, is_megatron, open_folder
from megaloom.runtime.weights.tensor_folder import has_tensors

from .artefact import is_packed
from .run_folder import TOKENIZER_NAME, is_run, no_checkpoint, plan_and_model

if TYPE_CHECKING:
    from megaloom.runtime.convert.megatron_weights import MegatronWeights
    from megaloom.runtime.convert.run_weights import RunWeights

    InitialWeights = HuggingFaceWeights | MegatronWeights | RunWeights


def open_weights(folder: Path, find: Callable[..., Checkpoint | None] = newest_intact) -> InitialWeights:
    """Open a folder with weights. Raise UserError if they cannot be read.

    find: the function that returns the checkpoint of a run: `latest`, `newest_intact` or, called by every rank,
    `checkpoint.newest_on_ranks`.
    """
    if is_run(folder):
        from megaloom.runtime.convert.run_weights import RunWeights  # imports megatron-core, as does the next

        plan, model = plan_and_model(folder)
        checkpoint = find(folder, fingerprint=plan.fingerprint)
        if checkpoint is None:
            raise no_checkpoint(folder)
        return RunWeights(folder, model, checkpoint)
    if is_packed(folder):
        raise UserError(f"{folder} is a packed run\nunpack it, and give the folder: megaloom unpack {folder}")
    if not is_megatron(folder):
        return open_folder(folder)
    from megaloom.runtime.convert.megatron_weights import MegatronWeights

    return MegatronWeights(folder)


def read_weights(folder: str | Path, model: Model) -> GivenValues:
    """Return the weights of a model from the folder of a run, of Hugging Face or of Megatron-LM, for `shard`.

    They are views of files, of which each rank reads its shards. Where ranks run already, every rank calls it. Raise
    UserError if the folder does not have the weights of the model.
    """
    from megaloom.runtime.checkpoints import checkpoint  # imports megatron-core

    given = open_weights(Path(folder), checkpoint.newest_on_ranks if dist.is_initialized() else newest_intact)
    given.check(model)
    return given.of(model)


def check_other_folder(weights: Path, out: Path) -> None:
    """Raise UserError if a run is to start from the weights of the folder that it is written to."""
    if is_run(weights) and weights.resolve() == out.resolve():
        raise UserError(
            f"--from {weights}: this is the folder of the run itself, which continues with `megaloom train {weights}`\n"
            "to start anew from its weights, give another folder with --out"
        )


def tokenizer_folder(weights: Path) -> Path:
    """Return the folder that has the tokenizer of given weights, if there is one."""
    return weights / TOKENIZER_NAME if is_run(weights) else weights


def config_beside(weights: Path) -> Path | None:
    """Return the config.json of given weights, if they have one."""
    path = weights / HF_FOLDER / CONFIG if is_run(weights) else weights / CONFIG
    return path if path.is_file() else None


def starting_notes(plan: Plan, model: Model, given: InitialWeights | None, recipe: Recipe) -> Iterator[str]:
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


def not_finite_note(given: InitialWeights) -> str | None:
    """Return a line that names the tensors of which a rank has read NaN or an infinite value. Every rank calls it."""
    own = sorted(given.files.not_finite) if isinstance(given, HuggingFaceWeights) else []
    names = sorted({name for each in gathered(own) for name in each})
    if not names:
        return None
    more = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
    return f"--from has NaN or infinite values in {', '.join(names[:3])}{more}: losses may not be finite"
