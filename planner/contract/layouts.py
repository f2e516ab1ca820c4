"""Many layouts at once: the fields of `Layout` as columns, one array entry for each layout.

Values of enumerated fields are their numbers, sets their bit masks (see `choices`). `alike` finds equal rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from .layout import FIELDS, Layout, LayoutFields

Column = NDArray[np.int64]
Rows = NDArray[np.float64]
NAMES = tuple(FIELDS)
LARGE, KEYS = 1 << 16, 1 << 62  # values from which a column is numbered anew; keys of rows that fit into 64 bits
TABLE_SIZE = 4  # values up to this many times the number of rows are counted in a table, larger ones sorted


@frozen(kw_only=True, eq=False, slots=False)
class Layouts(LayoutFields[Column]):
    """Layouts in columns; all columns have one length."""

    @classmethod
    def of(cls, layouts: Iterable[Layout]) -> Layouts:
        """Return these layouts as columns."""
        rows = [[int(getattr(x, name)) for name in NAMES] for x in layouts]
        columns = np.array(rows, dtype=np.int64).reshape(-1, len(NAMES)).T
        return cls(**dict(zip(NAMES, columns, strict=True)))

    @classmethod
    def joined(cls, parts: Sequence[Layouts]) -> Layouts:
        """Return the layouts of all parts, one part after the other."""
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in NAMES})

    def __len__(self) -> int:
        return len(self.dp)

    def __getitem__(self, i: int) -> Layout:
        return Layout(**{name: getattr(self, name).item(i) for name in NAMES})

    def each(self, which: Column) -> list[Layout]:
        """Return the layouts at these indices one by one."""
        columns = (getattr(self, name)[which].tolist() for name in NAMES)
        return [Layout(**dict(zip(NAMES, row, strict=True))) for row in zip(*columns, strict=True)]

    def take(self, which: Column | NDArray[np.bool_] | slice) -> Layouts:
        """Return the layouts at these indices, or those for which a mask is true."""
        if not isinstance(which, slice) and which.dtype == bool:
            which = np.flatnonzero(which)
        return Layouts(**{name: getattr(self, name)[which] for name in NAMES})

    def spread(self, choices: Sequence[dict[str, Column]], which: Column) -> Layouts:
        """Return layout i once for each row of `choices[which[i]]`, with the fields of that row."""
        sizes = np.array([len(next(iter(choice.values()))) for choice in choices], dtype=np.int64)
        counts, starts = sizes[which], np.concatenate([[0], np.cumsum(sizes)])[which]
        rows = np.repeat(np.arange(len(self)), counts)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        index = np.repeat(starts, counts) + within
        new = {name: np.concatenate([c[name] for c in choices])[index] for name in choices[0]} if choices else {}
        return Layouts(**{name: new[name] if name in new else getattr(self, name)[rows] for name in NAMES})


def alike(*columns: Column | NDArray[np.bool_]) -> tuple[Column, Column]:
    """Return the index of the first of each set of equal rows, and for each row the number of its set."""
    key, size = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns:
        top = int(column.max(initial=0))
        if top >= LARGE or column.min(initial=0) < 0:
            _, column = _distinct(column)
            top = int(column.max(initial=0))
        if size * (top + 1) > KEYS:
            _, key = _distinct(key)
            size = int(key.max(initial=0)) + 1
        key, size = key * (top + 1) + column, size * (top + 1)
    return _distinct(key)


def _distinct(column: Column | NDArray[np.bool_]) -> tuple[Column, Column]:
    """Return what `alike` does, for one column. numpy's `unique` imports masked arrays, which takes too long."""
    top = int(column.max(initial=0))
    if top <= TABLE_SIZE * len(column) and column.min(initial=0) >= 0:
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
