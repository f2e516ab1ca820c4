"""Comparison of two models by what their layers compute, apart from training options such as dropout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import frozen

from megaloom.dsl.graph import Model, graph, without_loss

from .json_form import JSON, graph_to_json

TRAINING_ONLY = frozenset({"dropout", "balance", "balance_over"})  # options that do not change what is computed


@frozen
class OptionDifference:
    """An option of a layer that two models have with different values; None is the default."""

    node: str
    option: str
    ours: Any
    theirs: Any

    def __str__(self) -> str:
        values = ["the default" if x is None else x for x in (self.ours, self.theirs)]
        return f"{self.option} of {self.node} is {values[0]}, not {values[1]}"


def differing_options(ours: Model, theirs: Model) -> Iterator[OptionDifference]:
    """Yield the options in which the layers of two models differ, each once, in the order of the layers."""
    seen: set[tuple[str, str]] = set()
    for one, other in zip(_nodes(ours), _nodes(theirs), strict=False):
        if one["kind"] != other["kind"]:
            yield OptionDifference(one["name"], "kind", one["kind"], other["kind"])
            return
        for option, a, b in _differences(one.get("fields", {}), other.get("fields", {})):
            if (one["kind"], option) not in seen:
                seen.add((one["kind"], option))
                yield OptionDifference(one["name"], option, a, b)


def _nodes(m: Model) -> list[JSON]:
    """Return the forms of the nodes of a model, without dropout, inputs and losses."""
    return [
        n
        for n in graph_to_json(graph(without_loss(m)))["nodes"]
        if n["kind"] not in ("Dropout", "Input", "DocumentIndices")
    ]


def _differences(a: JSON, b: JSON) -> Iterator[tuple[str, Any, Any]]:
    """Yield the fields with different values: name, and both values."""
    for name in sorted((a.keys() | b.keys()) - TRAINING_ONLY):
        x, y = a.get(name), b.get(name)
        if isinstance(x, dict) and isinstance(y, dict) and x.get("kind") == y.get("kind"):
            inside = _differences(x.get("fields", {}), y.get("fields", {}))
            yield from ((f"{name}.{inner}", p, q) for inner, p, q in inside)
        elif x != y:
            yield name, x, y
