"""Dropout whose masks depend on the layout: that of fused attention and of copies of a layer, such as experts.

`without_dropout` sets it to 0, so that layouts of the rest can be compared.
"""

from __future__ import annotations

from collections.abc import Collection

from attrs import evolve

from megaloom.dsl import Attend, Attention, Drop, Split
from megaloom.dsl.graph import Model, graph
from megaloom.dsl.node import Node, primitives
from megaloom.dsl.rewriting import rewritten
from megaloom.dsl.value import Value
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.module_kinds import runs_as_module
from megaloom.runtime.reference.dropout import dropout_rate


def layout_dropout(model: Model, layout: Layout) -> tuple[str, ...]:
    """Return the names of the nodes with dropout whose masks differ between a layout and one process."""
    splits = layout.split, Split()
    return tuple(n.name for n in graph(model).nodes if _layout_dropouts(n, splits))


def without_dropout(model: Model, names: Collection[str]) -> Model:
    """Return a model in which the dropout of `layout_dropout` is 0 in the nodes of these names."""
    nodes = [n for n in graph(model).nodes if n.name in names]
    applied = {id(n.value) for n in nodes}
    dropping = {id(v) for n in nodes for v, *_ in primitives(n.value) if dropout_rate(v.op)}

    def change(old: Value, copy: Value) -> Value:
        op = copy.op
        if id(old) in applied and isinstance(op, Attention):
            return evolve(copy, op=evolve(op, dropout=0.0))
        if id(old) not in dropping:
            return copy
        assert isinstance(op, Drop | Attend)
        return evolve(copy, op=evolve(op, rate=0.0) if isinstance(op, Drop) else evolve(op, dropout=0.0))

    return evolve(model, outputs=rewritten(model.outputs, change)) if nodes else model


def _layout_dropouts(node: Node, splits: tuple[Split, ...]) -> bool:
    """Return whether some dropout of a node has masks that depend on the layout."""
    for v, _, outer in primitives(node.value):
        if isinstance(v.op, Drop | Attend) and outer and dropout_rate(v.op):
            return True
        if isinstance(v.op, Attend) and v.op.dropout and any(runs_as_module(node, split) for split in splits):
            return True
    return False
