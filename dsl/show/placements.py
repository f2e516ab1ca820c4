"""The transitions of a model under a split: which op reads which value in another placement, and what that takes.

`placement_table(graph, split)` returns a rich renderable. A value is moved once for all ops that read it alike.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from megaloom.dsl.facts.placement import NodePlacement, Placement, Shard, Transition, Transitions
from megaloom.dsl.facts.primitives import Program, fitted, origin, program
from megaloom.dsl.facts.propagation import propagate
from megaloom.dsl.graph import Graph
from megaloom.dsl.sharding_table import SHARED_BY_HEADS, Split
from megaloom.dsl.value import Value

TITLES = ("layer", "read by", "value", "axis", "transition", "operation", "of the gradient")


def placement_table(g: Graph, split: Split) -> Table:
    """Return a table of the transitions in every kind of layer of a model."""
    out = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in TITLES:
        out.add_column(title, overflow="fold")
    last = ""
    for layer, *cells in placement_rows(g, split):
        out.add_row(*map(Text, ("" if layer == last else layer, *cells)))
        last = layer
    return out


def placement_rows(g: Graph, split: Split) -> Iterator[tuple[str, ...]]:
    """Yield a row of texts for each transition, in the order of the primitives; equal layers once."""
    layers: dict[Program, list[str]] = {}
    for node in g.nodes:
        layers.setdefault(fitted(program(node), split, SHARED_BY_HEADS), []).append(node.name)
    for p, names in layers.items():
        layer = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        for reader, v, t in _transitions(p, propagate(p, split)):
            change = f"{placement_text(t.source)} → {placement_text(t.target)}"
            operations = (one.operation.replace("_", "-") for one in (t, t.gradient))
            yield layer, reader, str(v.shape), t.axis, change, *operations


def placement_text(placement: Placement) -> str:
    """Return a placement as text: `Partial`, `Shard(seq, zigzag)`, `Shard(kv_heads, of 32 heads)`."""
    if not isinstance(placement, Shard):
        return type(placement).__name__
    heads = f"of {placement.heads} heads" if placement.heads else ""
    return f"Shard({', '.join(filter(None, (placement.dim, 'zigzag' * placement.zigzag, heads)))})"


def _transitions(p: Program, placement: NodePlacement) -> Iterator[tuple[str, Value, Transition]]:
    """Yield each transition once, with the value and the name of the op that reads it first."""
    performed: set[tuple[int, Transitions]] = set()
    for reader, v, transitions in _reads(p, placement):
        for i, transition in enumerate(transitions, 1):
            if (key := (id(origin(v)), transitions[:i])) not in performed:
                performed.add(key)
                yield reader, v, transition


def _reads(p: Program, placement: NodePlacement) -> Iterator[tuple[str, Value, Transitions]]:
    """Yield the transitions of each argument and result, and of the output."""
    for placed in placement.steps:
        for a, transitions in zip(placed.step.value.args, placed.reads, strict=True):
            yield placed.step.name, a, transitions
        yield f"result of {placed.step.name}", placed.step.value, placed.result
    yield "output", p.value, placement.output
