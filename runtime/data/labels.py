"""Labels beside a dataset: one class for each document, or for each token, as an indexed dataset PREFIX-labels.

A label is a number from 0, or a name; names are numbered in the order of their sorted list. IGNORED stands at tokens
without a label.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, field, frozen

from megaloom.dsl.errors import UserError

from .indexed import LABELS_SUFFIX, IndexedDataset, Ints, open_indexed, path_of, write_indexed

IGNORED = -100
"""The label of a token that has none, as in the library `transformers`."""
NAMES_SUFFIX = "-labels.json"
LARGEST_CLASS = 2**31 - 1


class LabelUnit(Enum):
    """The unit to which each label belongs."""

    DOCUMENT = "document"
    TOKEN = "token"


@frozen
class Labels:
    """The classes of the labels of a dataset."""

    unit: LabelUnit
    classes: int
    names: tuple[str, ...] = ()  # of the classes, in order; none if labels are numbers


@define
class CollectedLabels:
    """The labels of one part of a dataset, with numbers of its own for their names."""

    key: str
    unit: LabelUnit | None = None
    numbers: dict[str, int] = field(factory=dict)
    are_names: bool | None = None
    rows: list[Ints] = field(factory=list)

    def add(self, label: Any, place: Callable[[], str]) -> None:
        """Add the label of a document, or the list of labels of its tokens, where None and IGNORED mean none."""
        unit = LabelUnit.TOKEN if isinstance(label, list) else LabelUnit.DOCUMENT
        if self.unit not in (None, unit):
            raise UserError(
                f"{place()} has one label for each {unit.value} under {self.key!r}, and others for each "
                f"{unit and self.unit.value}\nmake a dataset of each kind"  # type: ignore[union-attr]
            )
        self.unit = unit
        each = label if isinstance(label, list) else [label]
        self.rows.append(np.array([self._number(x, place) for x in each], np.int64))

    def _number(self, label: Any, place: Callable[[], str]) -> int:
        """Return the number of one label."""
        if self.unit is LabelUnit.TOKEN and (label is None or label == IGNORED):
            return IGNORED
        is_name = isinstance(label, str)
        if not is_name and (isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < LARGEST_CLASS):
            raise UserError(
                f"{place()} has the label {label!r} under {self.key!r}\n"
                "a label is a name, or the number of a class, from 0"
            )
        if self.are_names not in (None, is_name):
            raise UserError(f"{place()} has the label {label!r}, and other labels are of another type\ngive one type")
        self.are_names = is_name
        return self.numbers.setdefault(label, len(self.numbers)) if is_name else int(label)

    def write(self, out: Path) -> None:
        """Write the labels of the part with this prefix, and the names of its own numbers."""
        write_indexed(self.rows, path_of(out, LABELS_SUFFIX), "i4")
        about = {"unit": self.unit and self.unit.value, "are_names": self.are_names, "names": list(self.numbers)}
        path_of(out, NAMES_SUFFIX).write_text(json.dumps(about))


def join_labels(parts: Sequence[Path], prefix: Path, declared: tuple[str, ...] = ()) -> Labels:
    """Write the labels of parts in order as PREFIX-labels, and return their classes.

    declared: the names that the sources themselves give to numbers. Raise UserError for parts of different kinds.
    """
    abouts = [json.loads(path_of(part, NAMES_SUFFIX).read_text()) for part in parts]
    units = {about["unit"] for about in abouts}
    kinds = {about["are_names"] for about in abouts} - {None}  # None: no token of the part has a label
    if len(units) != 1 or len(kinds) > 1:
        raise UserError(
            "some documents have one label, and others one for each token\nmake a dataset of each kind"
            if len(units) != 1
            else "some labels are names, and others are numbers\ngive one type"
        )
    names = sorted({name for about in abouts for name in about["names"]})
    datasets = [open_indexed(path_of(part, LABELS_SUFFIX)) for part in parts]
    highest = max((int(d.array.max()) for d in datasets if d.tokens), default=-1)
    numbers = {name: i for i, name in enumerate(names)}
    maps = [[numbers[n] for n in about["names"]] for about in abouts]
    named = tuple(names or declared)
    classes = len(named) if names else max(highest + 1, len(named))
    if not classes:
        raise UserError("no token of the data has a label\ngive --label-key a list with a class for some tokens")
    kind = "i2" if classes < 2**15 else "i4"
    write_indexed(_renumbered(datasets, maps), path_of(prefix, LABELS_SUFFIX), kind)
    return Labels(LabelUnit(units.pop()), classes, named if len(named) == classes else ())


def _renumbered(datasets: Sequence[IndexedDataset], maps: Sequence[list[int]]) -> Iterator[Ints]:
    """Yield the labels of each document, of parts with names by the numbers of the whole list."""
    for dataset, numbers in zip(datasets, maps, strict=True):
        of = np.array(numbers, np.int64)
        for i in range(dataset.documents):
            labels = dataset.document(i).astype(np.int64)
            yield np.where(labels == IGNORED, IGNORED, of[labels.clip(0)]) if numbers else labels
