"""What attention exchanges when its sequence is divided (cp), by the way it is done.

Protocol: `seconds` is what is seen of one of the facts' collectives of keys and values. The facts count a gathering of
keys and values, forward, and a scattering of their gradients, backward; a profile may do otherwise:

- all-gather: as the facts count it, before attention begins. That is what our runtime does.
- p2p: keys and values go around in a ring, a part at a time, while attention computes with the part before; back, their
  gradients go with them. What each part gives is added up by kernels of their own. Source:
  transformer_engine/pytorch/attention, AttnFuncWithCPAndKVP2P; megatron-core's default.
- all-to-all: queries, keys and values exchange parts of the sequence for parts of the heads, and what comes out goes
  back (DeepSpeed-Ulysses, arXiv:2309.14509).
"""

from __future__ import annotations

from megaloom.dsl.facts.collectives import Collective
from megaloom.dsl.facts.costs import Costs
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Precision

from . import communication, kernels
from .profiles.groups import ContextCommunication

ADDED = 3  # tensors that move as a part is added to the sum of those before: flash_attn_fwd_out_correction there
HALF = 3 / 4  # of them, since under a causal mask every second part has half of the queries


def context_parallel_seconds(
    way: ContextCommunication, c: Collective, found: Costs, layout: Layout, cluster: Cluster, precision: Precision
) -> float:
    """Seconds that attention waits for this exchange, one of a node with these costs."""
    group, nbytes = communication.process_group("cp", layout), c.elements * precision.nbytes
    if way is ContextCommunication.ALL_GATHER:
        return communication.collective_seconds(c.kind, nbytes, group, cluster)
    core = [w for w in found.work if w.kind == "attend"]
    queries = sum(w.count * w.m * w.k for w in core) * precision.nbytes
    if way is ContextCommunication.ALL_TO_ALL:
        there = communication.collective_seconds("all_to_all", queries + nbytes / layout.cp, group, cluster)
        return there + communication.collective_seconds("all_to_all", queries, group, cluster)
    took = [kernels.kernel_seconds(w, cluster.slowest, precision) for w in core]
    busy = sum(t.backward if c.backward else t.forward for t in took)
    around = communication.collective_seconds("all_gather", (2 if c.backward else 1) * nbytes, group, cluster)
    added = ADDED * (HALF * layout.cp * queries + (nbytes if c.backward else 0)) / cluster.device.moves
    return added + max(0.0, around - busy * (layout.cp - 1) / layout.cp)
