"""Stage cuts are the best there are: compared with every way to cut."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaloom.planner.stages import cut, evenest

ATOMS = st.lists(st.floats(0, 10), min_size=1, max_size=9)


def ways(atoms: list[float], count: int) -> list[tuple[int, ...]]:
    return [(0, *inner, len(atoms)) for inner in combinations(range(1, len(atoms)), count - 1)]


def runs(atoms: list[float], bounds: tuple[int, ...]) -> list[float]:
    return [sum(atoms[a:b]) for a, b in pairwise(bounds)]


def squares(atoms: list[float], bounds: tuple[int, ...]) -> float:
    return sum(x * x for x in runs(atoms, bounds))


@given(ATOMS, st.integers(1, 9))
def test_no_cut_is_more_even(atoms: list[float], count: int) -> None:
    bounds = evenest(np.array(atoms), count)
    every = ways(atoms, count)
    if not every:
        assert bounds is None
        return
    assert bounds in every
    slowest = min(max(runs(atoms, way)) for way in every)
    assert math.isclose(max(runs(atoms, bounds)), slowest, rel_tol=1e-9, abs_tol=1e-9)
    even = min(squares(atoms, way) for way in every if max(runs(atoms, way)) <= slowest + 1e-12)
    assert squares(atoms, bounds) <= even + 1e-9


@given(ATOMS, st.integers(1, 5), st.data())
def test_a_limit_on_each_run_is_kept(atoms: list[float], count: int, data: st.DataObject) -> None:
    limit = data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    bounds = evenest(np.array(atoms), count, lambda k: np.minimum(np.arange(len(atoms)) + limit[k], len(atoms)))
    every = [w for w in ways(atoms, count) if all(b - a <= n for a, b, n in zip(w, w[1:], limit, strict=False))]
    assert (bounds is None) == (not every)
    if bounds is not None:
        assert bounds in every
        slowest = min(max(runs(atoms, way)) for way in every)
        assert math.isclose(max(runs(atoms, bounds)), slowest, rel_tol=1e-9, abs_tol=1e-9)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.lists(st.integers(0, 20), min_size=1, max_size=5))
def test_a_run_may_have_no_room_for_what_others_hold(sizes: list[int], rooms: list[int]) -> None:
    held = np.concatenate([[0], np.cumsum(sizes)])
    atoms = [float(size % 4) for size in sizes]
    bounds = evenest(np.array(atoms), len(rooms), lambda k: np.searchsorted(held, held[:-1] + rooms[k], "right") - 1)
    every = [
        way
        for way in ways(atoms, len(rooms))
        if all(sum(sizes[a:b]) <= room for (a, b), room in zip(pairwise(way), rooms, strict=True))
    ]
    assert (bounds is None) == (not every)
    if bounds is not None:
        assert bounds in every
        assert max(runs(atoms, bounds)) == min(max(runs(atoms, way)) for way in every)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_chunks_begin_at_cuts_only(count: int) -> None:
    seconds, cuts = [1.0, 5.0, 1.0, 1.0, 1.0, 7.0, 1.0], (2, 3, 5)
    bounds = cut(seconds, cuts, count)
    if count > 4:
        assert bounds is None
    else:
        assert bounds is not None
        assert set(bounds) <= {0, *cuts, 7}
        assert len(bounds) == count + 1
