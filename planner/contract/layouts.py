"""Many layouts at once, in columns: what holds of one by its attributes holds of each by those of the columns.

Protocol: `Layouts` has the attributes of a `Layout`, each an array of whole numbers; switches are 0 and 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from attrs import fields, frozen
from numpy.typing import NDArray

from .layout import (
    AXES,
    CORE,
    INNER,
    Layout,
    Overlap,
    Recompute,
    bits,
    named,
    switched,
)

Column = NDArray[np.int64]
Rows = NDArray[np.float64]
MODES = tuple(Recompute)
SWITCHES = ("sequence_parallel", "distributed_optimizer")
NAMES = tuple(f.name for f in fields(Layout))
SMALL = 4  # times as many as there are rows


@frozen(eq=False, slots=False)
class Layouts:
    """As many layouts as each column is long. `recompute` is the place of the mode in MODES, sets of names are bits."""

    dp: Column
    tp: Column
    pp: Column
    vpp: Column
    cp: Column
    ep: Column
    etp: Column
    sequence_parallel: Column
    micro_batch: Column
    recompute: Column
    distributed_optimizer: Column
    recompute_modules: Column
    recompute_layers: Column
    microbatch_group: Column
    overlaps: Column

    @classmethod
    def of(cls, layouts: Iterable[Layout]) -> Layouts:
        """These layouts."""
        rows = [[_number(getattr(x, name)) for name in NAMES] for x in layouts]
        return cls(*np.array(rows, dtype=np.int64).reshape(-1, len(NAMES)).T)

    @classmethod
    def joined(cls, parts: Sequence[Layouts]) -> Layouts:
        """All of these."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in NAMES))

    def __len__(self) -> int:
        return len(self.dp)

    def __getitem__(self, i: int) -> Layout:
        values: dict[str, Any] = {name: int(getattr(self, name)[i]) for name in NAMES}
        values |= {name: bool(values[name]) for name in SWITCHES}
        values["recompute"] = MODES[values["recompute"]]
        values["recompute_modules"] = named(values["recompute_modules"])
        return Layout(**values | {"overlaps": switched(values["overlaps"])})

    def take(self, which: Column | NDArray[np.bool_] | slice) -> Layouts:
        """Those at these places, or those for which a mask is true."""
        return Layouts(*(getattr(self, name)[which] for name in NAMES))

    def spread(self, choices: Sequence[dict[str, Column]], which: Column) -> Layouts:
        """Each layout as often as it has choices: layout i takes, one after the other, those of `choices[which[i]]`."""
        sizes = np.array([len(next(iter(choice.values()))) for choice in choices], dtype=np.int64)
        counts, starts = sizes[which], np.concatenate([[0], np.cumsum(sizes)])[which]
        rows = np.repeat(np.arange(len(self)), counts)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        place = np.repeat(starts, counts) + within
        new = {name: np.concatenate([c[name] for c in choices])[place] for name in choices[0]} if choices else {}
        return Layouts(*(new[name] if name in new else getattr(self, name)[rows] for name in NAMES))

    @property
    def degrees(self) -> dict[str, Column]:
        """The degree of each axis, and the micro-batch size."""
        return {axis: getattr(self, axis) for axis in (*AXES, "micro_batch")}

    @property
    def world(self) -> Column:
        """Devices in all."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def edp(self) -> Column:
        """Copies of each expert."""
        return self.world // (self.pp * self.ep * self.etp)

    @property
    def group(self) -> Column:
        """Micro-batches that a chunk runs before the next one does."""
        return np.where(self.microbatch_group, self.microbatch_group, self.pp)

    @property
    def full(self) -> NDArray[np.bool_]:
        """Whether blocks are computed again."""
        full: NDArray[np.bool_] = self.recompute == MODES.index(Recompute.FULL)
        return full

    @property
    def selective(self) -> NDArray[np.bool_]:
        """Whether modules are."""
        selective: NDArray[np.bool_] = self.recompute == MODES.index(Recompute.SELECTIVE)
        return selective

    @property
    def module_bits(self) -> Column:
        """The modules that selective recompute computes again, as bits; 0 under another."""
        return np.where(self.selective, np.where(self.recompute_modules, self.recompute_modules, bits(CORE)), 0)

    @property
    def misnamed(self) -> NDArray[np.bool_]:
        """Whether modules are named, and none are computed again."""
        misnamed: NDArray[np.bool_] = (self.recompute_modules > 0) & ~self.selective
        return misnamed

    def hides(self, overlap: Overlap) -> NDArray[np.bool_]:
        """Whether this is exchanged while devices compute."""
        hides: NDArray[np.bool_] = self.overlaps & overlap.bit > 0
        return hides

    @property
    def inner(self) -> Column:
        """The overlaps that change what a node costs, as bits."""
        return self.overlaps & bits(INNER)

    def microbatches(self, batch: int) -> Column:
        """Micro-batches that each data-parallel rank runs for a global batch of `batch` sequences."""
        return batch // (self.dp * self.micro_batch)


def alike(*columns: Column | NDArray[np.bool_]) -> tuple[Column, Column]:
    """The first place of each distinct row of these columns, and which of these each row is like."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        _, code = _distinct(column)
        key = key * (int(code.max(initial=0)) + 1) + code
    return _distinct(key)


def _distinct(column: Column | NDArray[np.bool_]) -> tuple[Column, Column]:
    """As numpy's `unique`, whose import of masked arrays takes too long. Small numbers index a table."""
    top = int(column.max(initial=0))
    if top <= SMALL * len(column) and column.min(initial=0) >= 0:
        there = np.zeros(top + 1, dtype=bool)
        there[column.astype(np.intp)] = True
        code = (np.cumsum(there) - 1)[column.astype(np.intp)]
        first = np.empty(int(code.max(initial=-1)) + 1, dtype=np.int64)
        first[code[::-1]] = np.arange(len(column) - 1, -1, -1)  # of several the last that is written stays
        return first, code
    order = np.argsort(column, kind="stable")
    ordered = column[order]
    new = np.ones(len(column), dtype=bool)
    new[1:] = ordered[1:] != ordered[:-1]
    code = np.empty(len(column), dtype=np.int64)
    code[order] = np.cumsum(new) - 1
    return order[new], code


def _number(value: Any) -> int:
    if isinstance(value, tuple):
        return bits(value)
    return MODES.index(value) if isinstance(value, Recompute) else int(value)
