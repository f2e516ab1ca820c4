"""The nodes that mix positions, and the refusal of those that cannot go on from one position to the next."""

from __future__ import annotations

from collections.abc import Iterator

from megaloom.dsl import (
    Attend,
    Combine,
    Concat,
    Dot,
    Equals,
    Gate,
    Input,
    LogSumExp,
    Lookup,
    Node,
    Normalize,
    Rename,
    Route,
    Select,
    Shift,
    Slice,
    Sum,
    UserError,
    Value,
    Weight,
)
from megaloom.dsl.facts.primitives import Step, program
from megaloom.dsl.ops.attention_core import sequence_dim

from .decoding_graph import DecodingGraph, incremental_values
from .rules import RULES


def check_decoding(graph: DecodingGraph) -> None:
    """Raise UserError if a node of the model cannot go on from one position to the next."""
    for node in graph.nodes:
        for step in _incremental_steps(graph, node):
            reason = _refusal(step.value, graph.sequence.name)
            if reason is None and step.outer and type(step.value.op) in RULES:
                reason = "mixes positions inside the copies of a layer"
            if reason is not None:
                raise UserError(
                    f"{node.name} of {graph.graph.name} {reason}, so the model cannot write one token after the other\n"
                    "give the run of a causal decoder, or of an encoder-decoder"
                )


def first_after_mixing(graph: DecodingGraph) -> int:
    """Return the index of the first node after all that mix positions. From there on, positions are independent."""
    mixing = (
        i
        for i, node in enumerate(graph.nodes)
        if any(type(step.value.op) in RULES for step in _incremental_steps(graph, node))
    )
    return max(mixing, default=-1) + 1


def _incremental_steps(graph: DecodingGraph, node: Node) -> Iterator[Step]:
    """Yield the primitives of a node that depend on the written tokens."""
    p = program(node)
    values = incremental_values(p, tuple(name in graph.incremental for name in node.inputs))
    return (step for step in p.steps if id(step.value) in values)


def _refusal(v: Value, sequence: str) -> str | None:
    """Return why a primitive cannot go on at the next position; None if it can.

    sequence: the dim of the written tokens.
    """
    match v.op:
        case Attend():
            return _attention_refusal(v, v.op, sequence)
        case Shift(along, by) if along == sequence:
            return "reads later tokens" if by > 0 else None
        case Dot(over) | Sum(over) | Normalize(over):
            mixed: tuple[str, ...] = over
        case LogSumExp(over) | Concat(over) | Lookup(over) | Select(over) | Slice(over) | Rename(over):
            mixed = (over,)
        case Input() | Weight() | Gate() | Route() | Combine() | Equals():
            return None
        case _:
            known = v.op.elementwise or type(v.op) in RULES
            return None if known else f"has the op {type(v.op).__name__}, for which generation has no rule"
    return "reads all tokens at once" if sequence in mixed else None


def _attention_refusal(v: Value, op: Attend, sequence: str) -> str | None:
    queries, keys = (sequence_dim(a.shape).name for a in v.args[:2])
    if sequence not in (queries, keys):
        return "attends to all tokens at once"
    if queries == keys:
        return None  # it is causal: `decoding_graph` refuses others
    if queries != sequence:
        return "reads the written tokens from another sequence"
    located = op.causal or op.alibi or op.relative is not None
    return "attends by the distance between two sequences" if located else None
