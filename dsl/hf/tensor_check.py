"""Comparison of the tensors of a Hugging Face checkpoint with those that a model needs."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Model

from .tensor_layout import StoredTensor, stored_tensors
from .tensor_names import Names

TensorLike = TypeVar("TensorLike", bound=Any)
LISTED = 20  # tensors of each kind that a message names
NEAREST_SIMILARITY = 0.6  # of names (difflib), from which the nearest one is named


def check_tensors(names: Names, model: Model, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise UserError that names each missing tensor, each of another shape, and each that the model has no weight for.

    shapes: those of the tensors of a checkpoint, by name.
    """
    stored = {names.current(name): shape for name, shape in shapes.items()}
    wanted = {t.name: t for t in stored_tensors(names, model)}
    missing = [name for name in wanted if name not in stored]
    other = [name for name in wanted if name in stored and stored[name] != wanted[name].shape]
    extra = unknown_tensors(names, wanted, stored)
    lines = _first(missing, lambda name: f"missing: {_described(wanted[name])}{_nearest(name, extra)}")
    lines += _first(other, lambda name: f"{name} has shape {list(stored[name])}, not {list(wanted[name].shape)}")
    lines += _first(extra, lambda name: f"unknown: {name} {list(stored[name])}{_nearest(name, missing)}")
    if lines:
        raise UserError("\n".join((f"the tensors of the checkpoint are not those of model {model.name!r}", *lines)))


def check_values(
    names: Names,
    model: Model,
    checkpoint: Mapping[str, TensorLike],
    equal: Callable[[TensorLike, TensorLike | None], bool],
) -> None:
    """Raise UserError if a tensor that repeats another one differs from it, or one that must be zero is not.

    equal(x, y): True if two tensors of a checkpoint have equal shapes and values, or if x is zero and y is None.
    """
    stored = {names.current(name): x for name, x in checkpoint.items()}
    wanted = {t.name for t in stored_tensors(names, model)}
    for name, x in stored.items():
        twin = stored.get(names.copies.get(name, ""))
        if name in wanted:
            continue
        if twin is not None and not equal(x, twin):
            raise UserError(
                f"the checkpoint's {name} differs from its {names.copies[name]}, "
                f"but model {model.name!r} shares one weight"
            )
        if name in names.zero and not equal(x, None):
            raise UserError(f"the checkpoint's {name} is not zero, but model {model.name!r} has no such weight")


def unknown_tensors(names: Names, wanted: Collection[str], stored: Mapping[str, object]) -> list[str]:
    """Return the names of a checkpoint that no weight needs, and that are not known to be unused."""
    unused = re.compile("|".join(_pattern(u, wanted) for u in names.unused) or "(?!)")
    left = (name for name in stored if name not in wanted and not unused.match(name))
    return [name for name in left if name not in names.zero and names.copies.get(name) not in stored]


def _pattern(beginning: str, wanted: Iterable[str]) -> str:
    """Return a regular expression for names with a prefix; {beyond} matches the number of an unused layer."""
    before, mark, after = map(re.escape, beginning.partition("{beyond}"))
    if not mark:
        return before.replace(r"\{layer\}", r"\d+")
    numbers = {m[1] for name in wanted if (m := re.match(rf"{before}(\d+)\.", name))}
    return rf"{before}(?!(?:{'|'.join(numbers)})\.)\d+{after}"


def _described(t: StoredTensor) -> str:
    return f"{t.name} {list(t.shape)}, which holds {', '.join(s.name for s in t.slots)}"


def _nearest(name: str, others: list[str]) -> str:
    """Return the most similar of other names as the end of a line, or nothing."""
    near = get_close_matches(name, others, 1, NEAREST_SIMILARITY)
    return f"; the nearest is {near[0]}" if near else ""


def _first(names: list[str], line: Callable[[str], str]) -> list[str]:
    """Return a line for each of the first names, and one that counts the others."""
    more = len(names) - LISTED
    return [*map(line, names[:LISTED]), *([f"and {more} more"] if more > 0 else [])]
