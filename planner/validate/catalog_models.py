"""Models of which a row says no more than the name: those of the examples, also as Hugging Face calls them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches

from attrs import frozen

from megaloom.dsl.catalog import examples, find
from megaloom.dsl.graph import Model, graph
from megaloom.planner.model.requirements import model_requirements

from .run import Row, UnfitError, text

DIMENSIONS = ("layers", "hidden", "heads")  # without one of which a row describes no model
# What a name has beside family and size: an owner, a tuning, a version of the weights, how long texts may be.
BESIDE = re.compile(r"^.*/|^(meta|nvidia)(?=-)|-(base|instruct|chat|hf|it|pt|v0-[12]|\d+k)(?=-|$)")
ALSO: Mapping[str, str] = {
    "llama31405b": "llama3-405b",
    "llama321b": "llama3-1b",
    "mistral7bv03": "mistral-7b-v3",
    "bloom": "bloom-176b",
}


@frozen
class Named:
    """A model of the examples."""

    whole: Model
    layers: int
    experts: int

    def model(self, dropout: float = 0.0) -> Model:
        """The model, with the dropout that it has."""
        return self.whole


def named(row: Row) -> Named | None:
    """The model that a row names, if it says none of its dimensions. Raises UnfitError for one that is not known."""
    if any(row.get(key) for key in DIMENSIONS):
        return None
    said, known = _plain(text(row, "model")), {_plain(name): name for name in examples()}
    name = known.get(said) or ALSO.get(said)
    if not name:
        near = get_close_matches(said, known, 1, 0.8)
        meant = f"; is {known[near[0]]} meant?" if near else ""
        raise UnfitError(f"no {', '.join(DIMENSIONS)}, and {text(row, 'model') or 'no model'} is no example{meant}")
    model, _ = find(name)
    asked = model_requirements(graph(model))
    return Named(model, asked.blocks, max((n for dim, n in asked.sizes("ep") if dim == "experts"), default=0))


def _plain(name: str) -> str:
    """A name without what it has beside family and size, and without marks between these."""
    plain = re.sub(r"[ ._]", "-", name.strip().lower())
    while plain != (less := BESIDE.sub("", plain).strip("-")):
        plain = less
    return plain.replace("-", "")
