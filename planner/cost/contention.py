"""Computation and a collective that run at the same time on one device, and by how much each slows the other.

A collective of NCCL holds a multiprocessor for each of its channels. Since Hopper a product of cuBLAS is one kernel:
its thread blocks, in clusters of two, hold all multiprocessors from its begin to its end. So a product gets only the
clusters that no channel touches, and a collective begins where a product ends, on the slowest of its ranks.
"""

from __future__ import annotations

import numpy as np
from attrs import frozen

from megaloom.planner.contract.layouts import Rows


@frozen
class Contention:
    """Speed that computation and a collective lose to each other while they run at the same time."""

    lost: float  # share of its speed that the computation loses
    stretch: float  # seconds that the collective takes then, of its seconds alone

    @property
    def least(self) -> float:
        """Return the least seconds by which a collective delays computation, as a share of its seconds alone."""
        return min(1.0, self.lost * self.stretch)

    def exposed_seconds(self, took: Rows, compute: Rows) -> Rows:
        """Return the seconds by which collectives delay the computation that runs beside each.

        took: of each collective alone. compute: of the computation that can hide it. With l and k for `lost` and
        `stretch`, both run for b = min(k took, compute / (1 - l)) seconds. Then took - b / k of the collective or
        compute - (1 - l) b of the computation remains, so the whole takes l b + took - b / k longer than computation.
        """
        both = np.minimum(self.stretch * took, compute / (1 - self.lost))
        exposed: Rows = self.lost * both + took - both / self.stretch
        return exposed
