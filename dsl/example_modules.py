"""The modules of `megaloom.examples`, found by listing the package."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

EXAMPLES = "megaloom.examples"


def example_modules(model: str = "") -> Iterator[ModuleType]:
    """Import and yield the modules of the examples one by one, first those that the name of a model begins with."""
    names = [info.name for info in pkgutil.iter_modules(importlib.import_module(EXAMPLES).__path__) if not info.ispkg]
    for name in sorted(names, key=lambda name: not model.startswith(hyphenated(name))):
        yield importlib.import_module(f"{EXAMPLES}.{name}")


def hyphenated(name: str) -> str:
    """Return a Python name as a model reference: llama3_8b as llama3-8b."""
    return name.replace("_", "-")
