"""Cutting a chain into chunks: exact, by dynamic programming.

Protocol: a model is a chain of atoms, what lies between two neighbouring cuts of its graph. `cut` says where each chunk
begins; `evenest` is the whole problem on plain numbers, `allowed` its memory limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Mask = NDArray[np.bool_]
SAME = 1 + 1e-12  # sums of the same seconds in another order


def cut(
    seconds: Sequence[float] | Matrix, cuts: Sequence[int], count: int, allowed: Callable[[int], Mask] | None = None
) -> tuple[int, ...] | None:
    """The positions 0, …, len(seconds) that bound `count` chunks of nodes, none empty, each begun at one of `cuts`.

    `seconds` are by node. None if there are too few cuts, or `allowed` leaves no way.
    """
    places = (0, *cuts, len(seconds))
    sums = np.add.reduceat(np.asarray(seconds, dtype=float), places[:-1])
    chosen = evenest(sums, count, allowed)
    return None if chosen is None else tuple(places[i] for i in chosen)


def evenest(atoms: Matrix, count: int, allowed: Callable[[int], Mask] | None = None) -> tuple[int, ...] | None:
    """The bounds of `count` non-empty runs of atoms whose slowest run is as quick as can be.

    Among those, the least sum of squares, so that what is not slowest is even too. `allowed(k)[i, j]` says whether
    run k may be atoms[i:j]. O(count · len(atoms)²), in numpy.
    """
    size = len(atoms) + 1
    if count >= size:
        return None
    if count == 1 and allowed is None:
        return (0, size - 1)
    sums = np.concatenate([[0.0], np.cumsum(atoms)])
    cost = sums[:, None] - sums[None, :]  # [end, start]: numpy is quick along the last axis
    cost[np.triu_indices(size)] = np.inf
    tables = [cost if allowed is None else np.where(allowed(k).T, cost, np.inf) for k in range(count)]
    best = tables[0][:, 0]
    for table in tables[1:]:
        best = np.maximum(best, table).min(axis=1)
    slowest = best[-1]
    if not np.isfinite(slowest):
        return None
    squares = np.where(cost <= slowest * SAME, cost**2, np.inf)
    return _walk([squares if table is cost else np.where(table < np.inf, squares, np.inf) for table in tables])


def _walk(tables: Sequence[Matrix]) -> tuple[int, ...]:
    """The bounds with the least sum of one entry [end, start] of each table in turn, from first to last atom."""
    best, back = tables[0][:, 0], []
    for table in tables[1:]:
        reach = best + table
        back.append(reach.argmin(axis=1))
        best = reach.min(axis=1)
    bounds = [len(best) - 1]
    for choice in reversed(back):
        bounds.append(int(choice[bounds[-1]]))
    return (0, *reversed(bounds))
