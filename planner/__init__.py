"""Where a model goes: the layout of its layers over the devices of a cluster, and what that costs."""

from __future__ import annotations

if __name__ != "megaloom.planner":
    raise ImportError("import megaloom.planner, not planner")

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cluster import Cluster as Cluster
    from .cluster import Device as Device
    from .cluster import Link as Link
    from .cluster import cluster as cluster
    from .layout import Layout as Layout
    from .layout import Precision as Precision
    from .layout import Recompute as Recompute
    from .layout import Runtime as Runtime
    from .layout import Workload as Workload
    from .legal.rule import Violation as Violation
    from .legal.rules import violations as violations
    from .plan import Plan as Plan
    from .plan import PlanError as PlanError
    from .plan import load as load
    from .plan import save as save
    from .search.search import Found as Found
    from .search.search import plan as plan

# What the package exports, and where it is; loaded when first asked for, so that `plan --help` loads none of it.
EXPORTS = {
    **dict.fromkeys(("Cluster", "Device", "Link", "cluster"), "cluster"),
    **dict.fromkeys(("Layout", "Precision", "Recompute", "Runtime", "Workload"), "layout"),
    **dict.fromkeys(("Plan", "PlanError", "load", "save"), "plan"),
    "Violation": "legal.rule",
    "violations": "legal.rules",
    **dict.fromkeys(("Found", "plan"), "search.search"),
}
__all__ = list(EXPORTS)


class _Package(ModuleType):
    """A package in which `plan` and `cluster` are the functions, though modules are called so too.

    Importing a submodule sets it as an attribute of its package; where a function has the name, that is left out.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in EXPORTS and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in EXPORTS:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{self.__name__}.{EXPORTS[name]}"), name)


sys.modules[__name__].__class__ = _Package
