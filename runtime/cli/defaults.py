"""Defaults and types of the options of `megaloom train` and `megaloom generate`."""

from typing import Literal

from megaloom.runtime.generation.settings import GenerationSettings
from megaloom.runtime.metrics.watching import Watching
from megaloom.runtime.optimizer.recipe import Recipe

DEFAULT_MODEL = "stdlib-gpt"
STANDARD_LIBRARY = "stdlib"  # as in `data.STDLIB`, whose module loads numpy
DEFAULT_RECIPE = Recipe()
SAVE_EVERY = EVALUATE_EVERY = 100  # steps
KEEP_LAST, KEEP_BEST = 2, 0  # checkpoints
NO_WATCHING = Watching()
DEFAULT_GENERATION = GenerationSettings()
TrainedPrecision = Literal["fp32", "bf16", "fp16"]
"""Precisions in which the runtime trains, without the import of its capability."""
