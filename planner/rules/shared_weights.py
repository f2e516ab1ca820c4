"""Weights that several graph nodes use, and those that our runtime cannot share.

`sharing_refusal(graph, split)` is used by the rule `runtime-sharing`, and by the runtime when it builds a model.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from megaloom.dsl import Graph, Node, Positions, Slot, Split, Weight
from megaloom.dsl.facts.primitives import fitted, program
from megaloom.dsl.node import primitives
from megaloom.dsl.sharding_table import SHARED_BY_HEADS, Sharded
from megaloom.planner.contract.module_kinds import TABLES, runs_as_module

from .rule import Words


def shared_weight_users(graph: Graph) -> dict[str, list[Node]]:
    """Return the weights that several nodes use, by name, with those nodes."""
    users: dict[str, list[Node]] = {}
    for n in graph.nodes:
        for slot in n.weights:
            users.setdefault(slot.name, []).append(n)
    return {name: nodes for name, nodes in users.items() if len(nodes) > 1}


def groups_of_copies(ranks_of_weights: Iterable[tuple[int, ...]], pp: int) -> tuple[tuple[int, ...], ...]:
    """Return the pipeline ranks of each process group that copies of weights need beside the groups of the axes.

    ranks_of_weights: for each trained weight, the pipeline ranks that hold a copy, in order. Copies on all pipeline
    ranks use the group of pp.
    """
    return tuple(dict.fromkeys(ranks for ranks in ranks_of_weights if 1 < len(ranks) < pp))


def stored_by_rows(graph: Graph) -> frozenset[str]:
    """Return the shared weights that are stored with `embed` last, in whichever order they were declared."""
    return frozenset(
        name for name, nodes in shared_weight_users(graph).items() if any(isinstance(n.op, TABLES) for n in nodes)
    )


@lru_cache(maxsize=256)
def sharing_refusal(graph: Graph, split: Split) -> Words | None:
    """Return the message and the fix for the first shared weight that the runtime cannot train, or None."""
    degrees = {"tp": split.tp, "ep": split.ep, "etp": split.etp}
    if max(degrees.values()) > 1 and (found := _shared_by_experts(graph)):
        (node, slot), (axis, degree) = found, next(item for item in degrees.items() if item[1] > 1)
        return (
            f"the experts of {node.name} share the weight {slot.name!r}, which {axis} {degree} does not allow",
            f"use {axis} 1, or make the weight in the body of the expert, so that each has its own",
        )
    refusals = (_refusal(name, nodes, split) for name, nodes in shared_weight_users(graph).items())
    return next((refusal for refusal in refusals if refusal), None)


@lru_cache(maxsize=16)
def _shared_by_experts(graph: Graph) -> tuple[Node, Slot] | None:
    """Return the first weight that several experts use, with its node; None if there is none."""
    for n in (n for n in graph.nodes if n.weights):
        table = program(n).table
        for v, _, outer in primitives(n.value):
            if isinstance(v.op, Weight) and table.among_experts(outer):
                slot = next(s for s in n.weights if s.value is v)
                if not slot.outer:
                    return n, slot
    return None


def _refusal(name: str, nodes: list[Node], split: Split) -> Words | None:
    modules = [n for n in nodes if runs_as_module(n, split)]
    if own := [n for n in modules if not isinstance(n.op, TABLES)]:
        users = ", ".join(n.name for n in nodes if n is not own[0])
        return (
            f"the weight {name!r} is shared by {own[0].name}, which has a torch module of its own, and {users}",
            f"leave out the method `module` of {type(own[0].op).__name__}, or give it a weight of its own",
        )
    rows = [n for n in modules if isinstance(n.op, Positions)]
    others = [n for n in nodes if n not in rows]
    if split.sequence_parallel and rows and others:
        return (
            f"with sequence parallelism, {rows[0].name} and {others[0].name} cannot share the weight {name!r}",
            "use --no-sequence-parallel, or give each its own table",
        )
    placements = {_local_sizes(n, name, split): n for n in nodes}
    if len(placements) > 1:
        (sizes, first), (other_sizes, other), *_ = placements.items()
        return (
            f"{first.name} and {other.name} share the weight {name!r}, but a device holds {_text(sizes)} of it for one "
            f"and {_text(other_sizes)} for the other",
            f"declare equal splits in {type(first.op).__name__} and {type(other.op).__name__}, or use tp 1",
        )
    return None


def _local_sizes(node: Node, name: str, split: Split) -> tuple[tuple[str, int], ...]:
    """Return the dims of a weight that a node uses, with their sizes on one device."""
    table = fitted(program(node), split, SHARED_BY_HEADS).table
    slot = _slot(node, name)
    axes = table.axes(slot.outer, slot.value.shape)
    sizes = []
    for d in slot.dims:
        entry = table.dims.get(d.name, Sharded("tp"))
        size = entry.local(d.known, split.degree(axes[d.name]), split) if d.name in axes else d.known
        sizes.append((d.name, size))
    return tuple(sizes)


def _text(sizes: tuple[tuple[str, int], ...]) -> str:
    return " x ".join(f"{dim} {size}" for dim, size in sizes)


def _slot(node: Node, name: str) -> Slot:
    return next(s for s in node.weights if s.name == name)
