"""The inputs of pricing that all layouts of a search share."""

from __future__ import annotations

from functools import cached_property

from attrs import frozen

from megaloom.dsl.facts.costs import costs
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.workload import Workload
from megaloom.planner.model.structure import ModelStructure
from megaloom.planner.simulate.intervals import interval, run_class

from .profiles.groups import FrameworkProfile


@frozen(eq=False, slots=False)
class Job:
    """A training job: the model, the workload, the cluster and the framework profile."""

    structure: ModelStructure
    workload: Workload
    cluster: Cluster
    profile: FrameworkProfile

    @cached_property
    def flops(self) -> int:
        """Return the FLOPs of a step without recompute; causal attention counts half."""
        batch, seq = self.workload.batch, self.workload.seq
        work = [w for n in self.structure.graph.nodes for w in costs(n, batch=batch, seq=seq).work]
        return sum(w.flops + w.dgrad + w.wgrad for w in work)

    @cached_property
    def spread(self) -> tuple[float, float]:
        """Return the 90 % interval of the step time as factors of the prediction."""
        work = [w for kind in self.structure.kinds for w in costs(kind.node, batch=1, seq=self.workload.seq).work]
        routed = any(w.kind == "route" for w in work)
        return interval(1.0, run_class(routed, self.workload.precision, self.cluster.device))
