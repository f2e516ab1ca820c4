"""Dropout whose masks depend on the layout: that of fused attention and of copies of a layer, such as experts.

`without_dropout` sets that of attention to 0, so that layouts of the rest can be compared.
"""

from __future__ import annotations

from collections.abc import Collection

from attrs import evolve

from megaloom.dsl import Attend, Attention, Drop, Split
from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Model, graph
from megaloom.dsl.node import Node, primitives
from megaloom.dsl.rewriting import rewritten
from megaloom.dsl.value import Value
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.module_kinds import runs_as_module
from megaloom.runtime.ops.dropout_masks import dropout_rate


def layout_dropout(model: Model, layout: Layout) -> tuple[str, ...]:
    """Return the names of the attention layers with dropout whose masks differ between a layout and one process.

    Raise UserError for such a dropout in another layer, such as in experts.
    """
    splits = layout.split, Split()
    nodes = [n for n in graph(model).nodes if _depends_on_layout(n, splits)]
    for node in nodes:
        if not isinstance(node.op, Attention):
            raise UserError(
                f"cannot verify a model with dropout in {node.name}: its masks depend on the layout\n"
                "set this dropout to 0 and verify that model; that of hidden states has equal masks under every layout"
            )
    return tuple(n.name for n in nodes)


def without_dropout(model: Model, names: Collection[str]) -> Model:
    """Return a model in which the dropout of the attention layers of these names is 0."""
    nodes = [n for n in graph(model).nodes if n.name in names]
    applied = {id(n.value) for n in nodes}
    cores = {id(v) for n in nodes for v, *_ in primitives(n.value) if isinstance(v.op, Attend)}

    def change(old: Value, copy: Value) -> Value:
        if id(old) in applied or id(old) in cores:
            assert isinstance(copy.op, Attention | Attend)
            return evolve(copy, op=evolve(copy.op, dropout=0.0))
        return copy

    return evolve(model, outputs=rewritten(model.outputs, change)) if nodes else model


def _depends_on_layout(node: Node, splits: tuple[Split, ...]) -> bool:
    """Return whether some dropout of a node has masks that depend on the layout."""
    for v, _, outer in primitives(node.value):
        if isinstance(v.op, Drop | Attend) and outer and dropout_rate(v.op):
            return True
        if isinstance(v.op, Attend) and v.op.dropout and any(runs_as_module(node, split) for split in splits):
            return True
    return False
