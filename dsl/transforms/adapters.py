"""Low-rank adapters as a transform of the declaration (LoRA; Hu et al., arXiv:2106.09685).

A matrix W of an adapted layer becomes W + (alpha / rank) A B. All weights but A and B are frozen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from attrs import evolve, field, frozen

from megaloom.dsl.dims import Dim
from megaloom.dsl.errors import ShapeError
from megaloom.dsl.graph import Model, graph
from megaloom.dsl.layer import Layer, is_layer, op_name
from megaloom.dsl.low_rank import LoRA, WeightGroups
from megaloom.dsl.node import Slot, primitives
from megaloom.dsl.ops.dot import Dot, dot
from megaloom.dsl.ops.weight import Weight, weight
from megaloom.dsl.rewriting import rewritten
from megaloom.dsl.value import Value

RANK = "lora_rank"  # the dim between A and B


@frozen
class Adapted(Layer):
    """A layer whose weights are frozen, with low-rank adapters of some of its matrices: x W + (alpha / rank) x A B.

    groups: names of the matrices, such as (("q",), ("v",)); the matrices of a group share A. A is uniform in
    ±1/sqrt(inputs) at first, as in PEFT, and B is zero. Raises ShapeError for a name that is no matrix of the layer.
    """

    inner: Layer = field(validator=is_layer)
    rank: int
    alpha: float
    groups: WeightGroups

    @property
    def name(self) -> str:
        """The name of the layer inside, which the node keeps."""
        return op_name(self.inner)

    def body(self, x: Value, /, **side: Value) -> Value:
        return self.of(self.inner(x, **side))

    def of(self, applied: Value) -> Value:
        """Return the inner layer, as it has been applied, with adapters."""
        outside = {id(a) for a in applied.args if not isinstance(a.op, Weight)}
        names = dict(matrices(applied))
        places = {name: (i, name) for i, group in enumerate(self.groups) for name in group}
        if unknown := [name for name in places if name not in names.values()]:
            known = ", ".join(sorted(set(names.values())))
            raise ShapeError(f"{self.inner} has no matrix {unknown[0]!r} to adapt: it has {known or 'none'}")
        shared: dict[tuple[int, int], Value] = {}

        def change(old: Value, copy: Value) -> Value:
            if isinstance(copy.op, Weight):
                return frozen_weight(copy)
            group, name = places.get(names.get(id(old), ""), (-1, ""))
            if not name:
                return copy
            x, w = copy.args
            over = copy.op.over if isinstance(copy.op, Dot) else ()
            low = shared.get((group, id(x)))
            if low is None:
                low = shared[group, id(x)] = self._low(x, w, over, self.groups[group][0])
            rank, out = Dim(RANK, self.rank), (d for d in w.shape if d.name not in over)
            return copy + dot(low, weight(f"{_own_name(w)}_lora_b", rank, *out, std=0.0), RANK)

        (out,) = rewritten((applied,), change, outside)
        return out

    def _low(self, x: Value, w: Value, over: tuple[str, ...], name: str) -> Value:
        """Return (alpha / rank) x A, where A has the name of the first matrix of its group."""
        dims = [w[name] for name in over]
        std = (3 * prod(d.known for d in dims)) ** -0.5
        a = weight(f"{name.rpartition('.')[2]}_lora_a", *dims, Dim(RANK, self.rank), std=std, uniform=True)
        return (self.alpha / self.rank) * dot(x, a, *over)

    def __str__(self) -> str:
        return f"{self.inner} with LoRA of rank {self.rank} on {', '.join(n for group in self.groups for n in group)}"


def frozen_weight(w: Value) -> Value:
    """Return a weight that training leaves as it is; a buffer stays one."""
    assert isinstance(w.op, Weight)
    return evolve(w, op=evolve(w.op, frozen=True)) if w.op.trained and not w.op.frozen else w


def adapted(m: Model, lora: LoRA) -> Model:
    """Return a model with adapters in the nodes that `lora` names, all else frozen. It remembers `m` as its `base`."""
    wanted, nodes = dict(lora.nodes), graph(m).nodes
    groups = {id(n.value): wanted.pop(n.name) for n in nodes if n.name in wanted}
    if wanted:
        raise ShapeError(f"model {m.name!r} has no layer {next(iter(wanted))}, which is to have adapters")

    def change(old: Value, copy: Value) -> Value:
        if isinstance(copy.op, Weight):
            return frozen_weight(copy)
        if id(old) not in groups:
            return copy
        assert isinstance(copy.op, Layer)
        layer = Adapted(copy.op, lora.rank, lora.alpha, groups[id(old)], at=copy.op.at)
        return evolve(copy, op=layer, body=layer.of(copy))

    return evolve(m, outputs=rewritten(m.outputs, change), base=m, lora=lora)


@frozen
class AdapterSlots:
    """Low-rank adapters with one factor A: A, the factor B of each matrix, and the names of the matrices."""

    a: Slot
    b: tuple[Slot, ...]
    weights: tuple[str, ...]


def adapter_slots(m: Model) -> Iterator[AdapterSlots]:
    """Yield the adapters of a model in the order of its nodes; none for a model without."""
    slots = graph(m).weights
    for node, groups in ({} if m.lora is None else m.lora.nodes).items():
        for group in groups:
            names = tuple(f"{node}.{name}" for name in group)
            yield AdapterSlots(slots[f"{names[0]}_lora_a"], tuple(slots[f"{n}_lora_b"] for n in names), names)


def matrices(applied: Value) -> Iterator[tuple[int, str]]:
    """Yield the products by a weight of an applied layer: the identity of the product, and the weight's name in it.

    Matrices of which there is a copy for each expert are left out.
    """
    found = list(primitives(applied))
    names: Mapping[int, str] = {id(v): f"{path}{v.op}" for v, path, outer in found if isinstance(v.op, Weight)}
    for v, _, outer in found:
        if isinstance(v.op, Dot) and not outer and id(v.args[1]) in names:
            yield id(v), names[id(v.args[1])]


def _own_name(w: Value) -> str:
    assert isinstance(w.op, Weight)
    return w.op.name
