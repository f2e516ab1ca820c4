"""Ways to deal the devices to the axes: layouts that differ in nothing else are variants of one way.

Protocol: `way` is a layout's, `alike` says which of many layouts have one; `best_of_each` chooses the layout of each
way that is shown, `simplest` one of those that are as quick.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from megaloom.planner.contract.layout import AXES, Layout
from megaloom.planner.contract.layouts import Layouts
from megaloom.planner.simulate.price import Priced

TIE_RATIO = 1.001  # a step that is this little longer is as good, and the simpler layout wins
DEGREES = tuple(axis for axis in AXES if axis != "vpp")  # chunks of a model divide no devices

DeviceMesh = tuple[int, ...]


def device_mesh(x: Layout) -> DeviceMesh:
    """The degrees by which a layout divides devices."""
    return tuple(getattr(x, axis) for axis in DEGREES)


def has_mesh(x: Layouts, one: DeviceMesh) -> NDArray[np.bool_]:
    """Which of these layouts are of this way."""
    mask: NDArray[np.bool_] = np.logical_and.reduce(
        [getattr(x, axis) == degree for axis, degree in zip(DEGREES, one, strict=True)]
    )
    return mask


def best_of_each_mesh(found: Sequence[Priced]) -> list[Priced]:
    """The best layout of each way, the best of all in front. `found` has the quickest first.

    If all are of one way there is nothing else to choose from, and they all are left.
    """
    best = simplest(found)
    ways: dict[DeviceMesh, list[Priced]] = {device_mesh(best.layout): []}
    for priced in found:
        ways.setdefault(device_mesh(priced.layout), []).append(priced)
    if len(ways) == 1:
        return [best, *(priced for priced in found if priced is not best)]
    others = [simplest(variants) for one, variants in ways.items() if one != device_mesh(best.layout)]
    return [best, *sorted(others, key=lambda priced: priced.seconds)]


def simplest(found: Iterable[Priced]) -> Priced:
    """The simplest of those that are as quick as the first, which is the quickest."""
    first, *others = found
    as_quick = [first, *(priced for priced in others if priced.seconds <= TIE_RATIO * first.seconds)]
    return min(as_quick, key=lambda priced: complexity(priced.layout))


def complexity(x: Layout) -> tuple[int, ...]:
    """How much there is to understand: axes in use, what is computed again, degrees, switches."""
    inner = (x.pp, x.tp, x.cp, x.ep, x.etp, x.vpp)
    again = int(x.recompute)
    switches = x.sequence_parallel + x.distributed_optimizer + x.microbatch_overlap_bits.bit_count()
    beside = len(x.recomputed_modules), x.microbatch_group, x.recompute_layers, switches, x.micro_batch
    return sum(n > 1 for n in inner), again, sum(inner), *beside
