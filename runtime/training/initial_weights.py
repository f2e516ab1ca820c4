"""The initial weights of a run, which `--from` names: a Hugging Face folder, or a checkpoint of Megatron-LM."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megaloom.runtime.weights.given import GivenWeights, is_megatron, open_folder

if TYPE_CHECKING:
    from megaloom.runtime.convert.megatron_weights import MegatronWeights


def open_weights(folder: Path) -> GivenWeights | MegatronWeights:
    """Open a folder with weights. Raise UserError if they cannot be read."""
    if not is_megatron(folder):
        return open_folder(folder)
    from megaloom.runtime.convert.megatron_weights import MegatronWeights  # imports megatron-core

    return MegatronWeights(folder)
