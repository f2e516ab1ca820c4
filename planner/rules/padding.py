"""Ops that our runtime cannot compute over a padded dim, such as a join, a slice or a norm.

`padding_refusal(node, split)` is used by the rule `runtime-padding`, and by the runtime when it builds a layer's body.
"""

from __future__ import annotations

from collections.abc import Iterator

from megaloom.dsl import Dim, Node, Split
from megaloom.dsl.facts.primitives import Step, fitted, program
from megaloom.dsl.sharding_table import SHARED_BY_HEADS

from .rule import Words


def padding_refusal(node: Node, split: Split) -> Words | None:
    """Return the message and the fix for the first op that the runtime cannot compute over a padded dim, or None.

    An op states with `padding` that it is correct.
    """
    for step in fitted(program(node), split, SHARED_BY_HEADS).steps:
        if step.value.op.ignores_padding:
            continue
        for d in _padded_dims(step, split):
            axis, chosen = step.axes[d.name], step.table.dims[d.name].multiple is None
            at = f"{node.name} ({getattr(node.op, 'at', '')}) applies {step.name} to {d}"
            if chosen and split.vocab_multiple > 1:
                multiple = f"{split.vocab_multiple} x {axis} {split.degree(axis)}"
                return f"{at}, which is padded to a multiple of {multiple}", "use --vocab-multiple 1"
            entry = f'"{d.name}": Sharded("tp", "whole")'
            return (
                f"{at}, which is padded to divide by {axis} {split.degree(axis)}",
                f"declare splits = {{{entry}}} in {type(node.op).__name__}, or use a {axis} that divides {d.size}",
            )
    return None


def _padded_dims(step: Step, split: Split) -> Iterator[Dim]:
    """Yield the dims of the arguments and the result of an op that are padded to divide by their axis."""
    for d in dict.fromkeys(d for v in (*step.value.args, step.value) for d in v.shape):
        if d.size is not None and d.name in step.axes:
            entry, degree = step.table.dims[d.name], split.degree(step.axes[d.name])
            if entry.physical(d.known, degree, split) != d.known:
                yield d
