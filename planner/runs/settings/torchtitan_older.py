"""torchtitan's options of 2024, before the section `parallelism`, under the names that they have since."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from attrs import evolve

from megaloom.planner.runs.words import Word

_DEGREES = (
    "tensor_parallel_degree",
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "pipeline_parallel_degree",
    "pipeline_parallel_schedule",
    "context_parallel_degree",
    "enable_async_tensor_parallel",
    "enable_compiled_autograd",
)
RENAMED_OPTIONS: Mapping[str, str] = MappingProxyType(
    {f"{section}.{name}": f"parallelism.{name}" for section in ("training", "experimental") for name in _DEGREES}
    | {"training.data_parallel_degree": "parallelism.data_parallel_shard_degree"}
)
"""Options of the releases until January 2025, and their names since then."""
_LOSS, _FLOAT8 = "training.enable_loss_parallel", "float8.enable_float8_linear"


def current_options(options: Mapping[str, Word]) -> dict[str, Word]:
    """Return the options under their newer names; those that say what is so anyway are left out."""
    current = {RENAMED_OPTIONS.get(name, name): word for name, word in options.items()}
    loss, float8 = current.pop(_LOSS, None), current.pop(_FLOAT8, None)
    if loss is not None and loss.text.lower() == "false":
        current["parallelism.disable_loss_parallel"] = evolve(loss, text="true")
    if float8 is not None and float8.text.lower() == "true":
        current["model.converters"] = evolve(float8, text="float8")
    return current
