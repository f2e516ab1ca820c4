"""Device meshes of layouts: the degrees of the axes that divide devices.

A search shows the best layout of each device mesh (see `simple_first`); layouts that differ only in other fields are
its variants.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megaloom.planner.contract.layout import AXES, Layout
from megaloom.planner.contract.layouts import Layouts

TIE_RATIO = 1.001  # steps closer than this count as equally fast
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
