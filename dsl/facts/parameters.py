"""Parameters of a model: all, those that training changes, and those that are frozen."""

from __future__ import annotations

from megaloom.dsl.dims import Sizes
from megaloom.dsl.errors import ShapeError
from megaloom.dsl.graph import Model, graph
from megaloom.dsl.node import Node
from megaloom.dsl.value import Value


def params(x: Model | Node | Value, *, trained: bool | None = None) -> int:
    """Return the parameters of a model, a graph node, or all that a value is computed from; each distinct weight once.

    trained: True counts only the weights that training changes; False only the others, frozen ones and buffers, which
    have neither gradients nor optimizer state. Raises ShapeError for a layer alone, which has no sizes.
    """
    if isinstance(x, Value):
        x = Model("", (x,))
    if not isinstance(x, Model | Node):
        raise ShapeError(
            f"cannot count the parameters of {x} alone: their sizes follow from the value that it is applied to\n"
            "write params(value >> layer)"
        )
    slots = graph(x).weights.values() if isinstance(x, Model) else x.weights
    return sum(Sizes()(s.dims) for s in slots if (s.is_parameter if trained is None else s.trained is trained))


def parameters_text(m: Model) -> str:
    """Return the number of parameters as text, with that of the trained ones if others are frozen."""
    whole, trained = params(m), params(m, trained=True)
    return f"{whole:,} parameters" + (f" ({trained:,} trained)" if trained < whole else "")
