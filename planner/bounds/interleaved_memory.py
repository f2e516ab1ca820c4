"""What the fullest rank holds of interleaved chunks, at the least: many schedules at once, by their columns.

Protocol: `held` gives bytes; `many` says where ways to cut are so many that chunks are cut as it takes them to be.
"""

from __future__ import annotations

from math import comb

import numpy as np
from numpy.typing import NDArray

from megaloom.planner.contract.layouts import Column
from megaloom.planner.cost.memory import rank_memory
from megaloom.planner.partition.dynamic_program import FloatVector
from megaloom.planner.partition.local_search import ENUMERATED

TINY = 1e-300  # for what is divided by nothing
INVERSE = np.concatenate([[0.0], np.cumsum(1 / np.arange(1.0, 2**13, 2))])  # 1 + 1/3 + 1/5 + ..., so many of them


def many(atoms: int) -> NDArray[np.bool_]:
    """For each number of stages, whether there are more ways to cut so many atoms than may all be looked at."""
    return np.array([False, *(comb(atoms - 1, cuts) > ENUMERATED for cuts in range(atoms))])


def held(
    state: FloatVector, saved: FloatVector, each: FloatVector, pp: Column, vpp: Column, group: Column
) -> FloatVector:
    """Bytes of a rank: `state` and `saved` (of one micro-batch) are the whole model's; a stage saves `each` at most.

    Either a rank's chunks have equal shares of its memory; weighed by the inverse of what is in flight, as in
    `memory.least_rank_memory`, they hold so much. Or `each` is not exceeded; then what is saved is at best with the stages that
    have the least in flight: the last ranks' last chunks, 1, 3, 5, ..., and then all others, a group.
    """
    odd = np.minimum(pp, (group + 1) // 2)
    inverse = INVERSE[odd] + (pp * vpp - odd) / group
    share = vpp / inverse
    equal = rank_memory(state / group * share, saved * share, 1.0, 0.0)
    each = np.minimum(saved, each)
    full = np.floor(saved / np.maximum(each, TINY))
    kept = np.where(full < odd, full**2, odd**2 + (full - odd) * group) * each
    kept = kept + (saved - full * each) * np.where(full < odd, 2 * full + 1, group)
    least: FloatVector = np.minimum(equal, rank_memory(state / pp, kept / pp, 1.0, 0.0))
    return least
