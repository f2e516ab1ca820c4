"""Lower bound of the memory of a rank with several model chunks, for the partitions that the partitioner may choose."""

from __future__ import annotations

from math import comb

import numpy as np
from numpy.typing import NDArray

from megaloom.planner.contract.layouts import Column
from megaloom.planner.cost.memory import rank_memory
from megaloom.planner.partition.dynamic_program import FloatVector
from megaloom.planner.partition.local_search import ENUMERATED
from megaloom.planner.pipeline import schedules

from .base_costs import TINY


def too_many_partitions(segments: int) -> NDArray[np.bool_]:
    """Return for each number of stages whether there are too many partitions of so many segments to enumerate."""
    return np.array([False, *(comb(segments - 1, cuts) > ENUMERATED for cuts in range(segments))])


def interleaved_nbytes(
    state: FloatVector, saved: FloatVector, stage: FloatVector, pp: Column, vpp: Column, group: Column
) -> FloatVector:
    """Return the least bytes of state and saved activations of the rank with the most memory: [layouts].

    `state` and `saved` (of one micro-batch) are bytes of the whole model; a stage saves at most `stage`. It holds where
    `too_many_partitions`: no stage is slower than the partitioner accepts.

    Bound: peak ≥ (S + Σ n a_s) / p with a_s ≤ `stage`, the activations placed where the fewest micro-batches are in
    flight. Those of the last chunks of the last ranks are 1, 3, 5, ... up to g, and g of all other stages.
    See docs/concepts/bounds.md.
    """
    odd = np.minimum(pp, (group + 1) // 2)
    stage = np.minimum(saved, stage)
    full = np.floor(saved / np.maximum(stage, TINY))
    held = np.where(full < odd, full**2, odd**2 + (full - odd) * group) * stage
    held = held + (saved - full * stage) * np.where(full < odd, 2 * full + 1, group)
    return rank_memory(state / pp, held / pp, 1.0, 0.0)


def capped_activations(
    saved: FloatVector, stage: FloatVector, received: FloatVector, pp: int, vpp: int, m: Column, group: Column
) -> FloatVector:
    """Return the least activations that all ranks together have in flight, if a stage saves at most `stage`: [layouts].

    saved: bytes that the whole model saves of one micro-batch. received: bytes that each stage but the first saves of
    its input. All layouts have pp ranks of vpp chunks; m micro-batches, microbatch groups.

    Bound: Σ_s n_s a_s + received Σ_{s>0} n_s, with Σ a_s = saved and 0 ≤ a_s ≤ `stage`. n_s is in flight of stage s at
    the first backward pass of its rank. The sum is least if stages are filled in the order of n_s.
    """
    in_flight = schedules.first_in_flight(pp, vpp, m, group).reshape(len(m), -1)
    later = in_flight[:, 1:].sum(axis=1)
    in_flight.sort(axis=1)
    full = np.minimum(np.floor(saved / np.maximum(stage, TINY)), pp * vpp - 1).astype(np.int64)[:, None]
    before = np.take_along_axis(np.cumsum(in_flight, axis=1) - in_flight, full, axis=1)[:, 0]
    last = np.take_along_axis(in_flight, full, axis=1)[:, 0]
    least: FloatVector = before * stage + (saved - full[:, 0] * stage) * last + later * received
    return least
