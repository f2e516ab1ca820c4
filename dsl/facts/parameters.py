"""Parameters of a model, and its weights that are not trained."""

from __future__ import annotations

from megaloom.dsl.dims import Sizes
from megaloom.dsl.errors import ShapeError
from megaloom.dsl.graph import Model, graph
from megaloom.dsl.node import Node
from megaloom.dsl.value import Value


def params(x: Model | Node | Value, *, trained: bool = True) -> int:
    """Return the parameters of a model, a graph node, or all that a value is computed from; each distinct weight once.

    trained: count the weights that training changes; False counts the others, such as buffers, which have neither
    gradients nor optimizer state. Raises ShapeError for a layer alone, which has no sizes.
    """
    if isinstance(x, Value):
        x = Model("", (x,))
    if not isinstance(x, Model | Node):
        raise ShapeError(f"{x} alone has no parameters: their sizes follow from what it is applied to, value >> layer")
    slots = graph(x).weights.values() if isinstance(x, Model) else x.weights
    return sum(Sizes()(s.dims) for s in slots if s.trained is trained)
