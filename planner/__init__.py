"""Plans of training runs: the layout of a model over the devices of a cluster, and its predicted cost."""

from __future__ import annotations

if __name__ != "megaloom.planner":
    raise ImportError("import megaloom.planner, not planner")

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .contract.choices import Overlap as Overlap
    from .contract.choices import Recompute as Recompute
    from .contract.choices import Shard as Shard
    from .contract.devices import Cluster as Cluster
    from .contract.devices import Device as Device
    from .contract.devices import Link as Link
    from .contract.layout import Layout as Layout
    from .contract.plan_json import load as load
    from .contract.plan_json import save as save
    from .contract.plans import Plan as Plan
    from .contract.plans import PlanError as PlanError
    from .contract.workload import Precision as Precision
    from .contract.workload import Runtime as Runtime
    from .contract.workload import Workload as Workload
    from .hardware.cluster_names import cluster as cluster
    from .report.run_cost import RunCost as RunCost
    from .report.run_cost import fewest_devices as fewest_devices
    from .report.run_cost import training_cost as training_cost
    from .report.token_budget import TokenBudget as TokenBudget
    from .rules.rule import Violation as Violation
    from .rules.rules import violations as violations
    from .search.search import Found as Found
    from .search.search import plan as plan

# Public names and their modules. Each is imported on first use, so that `plan --help` imports none.
EXPORTS = {
    **dict.fromkeys(("Cluster", "Device", "Link"), "contract.devices"),
    "cluster": "hardware.cluster_names",
    **dict.fromkeys(("Overlap", "Recompute", "Shard"), "contract.choices"),
    "Layout": "contract.layout",
    **dict.fromkeys(("Precision", "Runtime", "Workload"), "contract.workload"),
    **dict.fromkeys(("load", "save"), "contract.plan_json"),
    **dict.fromkeys(("Plan", "PlanError"), "contract.plans"),
    **dict.fromkeys(("RunCost", "fewest_devices", "training_cost"), "report.run_cost"),
    "TokenBudget": "report.token_budget",
    "Violation": "rules.rule",
    "violations": "rules.rules",
    **dict.fromkeys(("Found", "plan"), "search.search"),
}
__all__ = list(EXPORTS)


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{EXPORTS[name]}"), name)
