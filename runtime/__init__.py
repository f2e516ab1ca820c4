"""Running a plan: training a declared model on megatron-core, laid out as planned."""

from __future__ import annotations

if __name__ != "megaloom.runtime":
    raise ImportError("import megaloom.runtime, not runtime")

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .loop import Summary as Summary
    from .recipe import Recipe as Recipe
    from .train import train as train
    from .verify import Comparison as Comparison
    from .verify import compare as compare

# What the package exports, and where it is; loaded when first asked for, so that `megaloom --help` loads no torch.
EXPORTS = {"Recipe": "recipe", "Summary": "loop", "train": "train", "Comparison": "verify", "compare": "verify"}
__all__ = list(EXPORTS)


class _Package(ModuleType):
    """A package in which `train` is the function, though a module is called so too (as in megaloom.planner)."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in EXPORTS and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in EXPORTS:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{self.__name__}.{EXPORTS[name]}"), name)


sys.modules[__name__].__class__ = _Package
