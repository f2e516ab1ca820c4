"""Device meshes of layouts: the degrees of the axes that divide devices, and the best layout of each mesh.

A search shows the best layout of each device mesh; layouts that differ only in other fields are its variants.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from megaloom.planner.contract.layout import AXES, Layout
from megaloom.planner.contract.layouts import Layouts
from megaloom.planner.simulate.price import Priced

TIE_RATIO = 1.001  # steps closer than this count as equally fast, and the simpler layout wins
MESH_FIELDS = tuple(axis for axis in AXES if axis != "vpp")  # model chunks do not divide devices

DeviceMesh = tuple[int, ...]


def device_mesh(x: Layout) -> DeviceMesh:
    """Return the degrees of a layout that divide devices, in the order of MESH_FIELDS."""
    return tuple(getattr(x, axis) for axis in MESH_FIELDS)


def has_mesh(x: Layouts, mesh: DeviceMesh) -> NDArray[np.bool_]:
    """Return for each layout whether it has this device mesh."""
    mask: NDArray[np.bool_] = np.logical_and.reduce(
        [getattr(x, axis) == degree for axis, degree in zip(MESH_FIELDS, mesh, strict=True)]
    )
    return mask


def best_of_each_mesh(simulated: Sequence[Priced]) -> list[Priced]:
    """Return the best layout of each device mesh, the best of all first; `found` is sorted by step time.

    If all have the same device mesh, return all of them.
    """
    best = simplest(simulated)
    meshes: dict[DeviceMesh, list[Priced]] = {device_mesh(best.layout): []}
    for priced in simulated:
        meshes.setdefault(device_mesh(priced.layout), []).append(priced)
    if len(meshes) == 1:
        return [best, *(priced for priced in simulated if priced is not best)]
    others = [simplest(variants) for mesh, variants in meshes.items() if mesh != device_mesh(best.layout)]
    return [best, *sorted(others, key=lambda priced: priced.seconds)]


def simplest(simulated: Iterable[Priced]) -> Priced:
    """Return the simplest of the layouts that tie with the first one, which is the fastest."""
    first, *others = simulated
    ties = [first, *(priced for priced in others if priced.seconds <= TIE_RATIO * first.seconds)]
    return min(ties, key=lambda priced: complexity(priced.layout))


def complexity(x: Layout) -> tuple[int, ...]:
    """Return a key that orders layouts by simplicity: axes in use, recompute, degrees, switches."""
    degrees = (x.pp, x.tp, x.cp, x.ep, x.etp, x.vpp)
    recompute = int(x.recompute)
    switches = x.sequence_parallel + x.shard + x.microbatch_overlap_bits.bit_count()
    details = len(x.recomputed_modules), x.microbatch_group, x.recompute_layers, switches, x.micro_batch
    return sum(n > 1 for n in degrees), recompute, sum(degrees), *details
