"""Defaults and types of the options of `megaloom train` and `megaloom generate`."""

from typing import Literal

from megaloom.runtime.generation.settings import GenerationSettings

DEFAULT_MODEL = "stdlib-gpt"
DEFAULT_GENERATION = GenerationSettings()
TrainedPrecision = Literal["fp32", "bf16", "fp16", "fp8"]
"""Precisions in which the runtime trains, without the import of its capability."""
