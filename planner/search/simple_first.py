"""The order of layouts that are nearly as fast as the fastest one: the simplest first, as an expert would run it."""

from __future__ import annotations

from math import inf

from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.simulate.price import Priced

NEAR_RATIO = 1.01  # a layout that is at most this much slower than the fastest one may be recommended in its place


def simplicity_order(x: Layout, cluster: Cluster) -> tuple[float, ...]:
    """Return a key that orders layouts by simplicity, the simplest first; each number decides where those before tie.

    1. Axes in use of tp, pp, cp, ep and etp. Data parallelism is free, and model chunks (vpp) come third.
    2. Whether tensor-parallel ranks, of dense layers or of experts, are in more than one node.
    3. vpp. 4. cp. 5. Recompute: none before selective before full; fewer modules; fewer blocks of each stage.
    6. Degrees, vpp and the micro-batch size that are not powers of two.
    """
    degrees = (x.tp, x.pp, x.cp, x.ep, x.etp)
    across = cluster.nodes > 1 and any(cluster.per_node % tp for tp in (x.tp, x.etp))
    blocks = (x.recompute_layers or inf) if x.recompute is Recompute.FULL else 0
    odd = sum(n & (n - 1) > 0 for n in (*degrees, x.vpp, x.micro_batch))
    return sum(n > 1 for n in degrees), across, x.vpp, x.cp, x.recompute, len(x.recomputed_modules), blocks, odd


def preference(priced: Priced) -> tuple[float, ...]:
    """Return a key that orders layouts of nearly one step time: simplest first, then least memory, then least time."""
    cluster = priced.partition.problem.job.cluster
    return *simplicity_order(priced.layout, cluster), max(priced.partition.peaks), priced.seconds
