"""Defaults of the options of `megaloom train`."""

from megaloom.runtime.training.recipe import Recipe

DEFAULT_MODEL = "stdlib-gpt"
STANDARD_LIBRARY = "stdlib"  # as in `data.STDLIB`, whose module loads numpy
DEFAULT_RECIPE = Recipe()
