"""The nodes of a graph: applied layers, with a slot for each of their weights, and the primitives that they apply."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen

from megaloom.dsl.ops.loss import is_loss
from megaloom.dsl.ops.weight import INITIAL_STD, Input, Weight

from .combine import Each
from .dims import Dim, Shape
from .layer import Named
from .op import Op
from .value import Value


@frozen
class Slot:
    """One use of a weight in the graph: its name in the model, and the dims of the copies around it (experts)."""

    name: str
    value: Value
    outer: tuple[Dim, ...] = ()
    model_std: float = INITIAL_STD  # of the weights of its model that have none of their own

    @property
    def std(self) -> float:
        """The standard deviation of the initial values."""
        own = self.value.op.std if isinstance(self.value.op, Weight) else None
        return self.model_std if own is None else own

    @property
    def dims(self) -> tuple[Dim, ...]:
        """The dims of the weight, those of the copies first."""
        return (*self.outer, *self.value.shape.dims)

    @property
    def is_parameter(self) -> bool:
        """True for a parameter, trained or frozen; False for a buffer."""
        return isinstance(self.value.op, Weight) and self.value.op.trained

    @property
    def trained(self) -> bool:
        """True for a parameter that training changes; False for a frozen one and for a buffer."""
        return self.is_parameter and not self.frozen

    @property
    def frozen(self) -> bool:
        """True for a parameter that training leaves as it is."""
        return isinstance(self.value.op, Weight) and self.value.op.frozen


@frozen(eq=False)
class Node:
    """One applied layer: its name, its op, the nodes that it reads, its weights, and the number of its block."""

    name: str
    op: Op
    inputs: tuple[str, ...]
    value: Value
    block: int | None
    weights: tuple[Slot, ...] = ()

    @property
    def shape(self) -> Shape:
        """The shape of the node's output."""
        return self.value.shape

    @property
    def is_input(self) -> bool:
        """True if the data provides this node."""
        return isinstance(self.op, Input)

    @property
    def is_loss(self) -> bool:
        """True if the node computes a loss, or the sum of several."""
        return is_loss(self.value)


def primitives(value: Value) -> Iterator[tuple[Value, str, tuple[Dim, ...]]]:
    """Yield the primitives of an applied layer, arguments first: (value, path in the layer, dims of the copies)."""
    outside = {id(a) for a in value.args if not isinstance(a.op, Weight)}
    seen: set[int] = set()
    todo: list[tuple[Value, str, tuple[Dim, ...], bool]] = [(value, "", (), False)]
    while todo:  # without recursion: programs are deeper than Python's stack
        v, path, outer, ready = todo.pop()
        if ready:
            yield v, path, outer
        elif id(v) not in seen and id(v) not in outside:
            seen.add(id(v))
            inside, copies = path, outer
            if v.body is not None and isinstance(v.op, Each):
                inside, copies = f"{path}{v.op.dim}.", (*outer, v.shape.dims[0])
            elif v.body is not None and isinstance(v.op, Named):
                inside = f"{path}{v.op.name}."
            todo.append((v, path, outer, True) if v.body is None else (v.body, inside, copies, False))
            todo += [(a, path, outer, False) for a in reversed(v.args)]
