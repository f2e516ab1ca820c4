"""Rules of sizes: dims of the model that each axis must divide."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megaloom.dsl.files.built_in import is_built_in
from megaloom.dsl.graph import Graph
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Column
from megaloom.planner.model.requirements import ModelRequirements

from .divisors import divisors, nearest
from .rule import (
    Case,
    L,
    Owner,
    Rule,
    Truth,
    Words,
    all_of,
)

DimSizes = Callable[[ModelRequirements], list[tuple[str, int]]]  # (dim, size) pairs


def divides(id: str, sentence: str, axis: str, source: str, sizes_of: DimSizes) -> Rule:
    """Return the rule that the degree of an axis divides these sizes."""

    def holds(case: Case[L]) -> Truth:
        degree = getattr(case.layout, axis)
        return all_of(size % degree == 0 for _, size in sizes_of(case.requirements))

    def text(case: Case[Layout]) -> Words:
        degree, dims = getattr(case.layout, axis), sizes_of(case.requirements)
        dim, size = next((dim, size) for dim, size in dims if size % degree)
        allowed = allowed_tps(case.requirements) if axis == "tp" else divisors(*(n for _, n in dims))
        message = f"{axis} {degree} does not divide {dim}={size}{_kept_whole(case.graph, axis, dim, size)}"
        return message, f"use {axis} {nearest_degrees(case, degree, allowed)}"

    return Rule(
        id=id,
        sentence=sentence,
        fix=f"use {axis} that divides them all",
        owner=Owner.CORE,
        source=source,
        holds=holds,
        explain=text,
    )


def _kept_whole(graph: Graph, axis: str, dim: str, size: int) -> str:
    """Return the entry of `splits` with which a layer of a user's own would keep a dim whole; "" for other layers."""
    holders = [n for n in graph.nodes for s in n.weights if any((d.name, d.size) == (dim, size) for d in s.dims)]
    kinds = dict.fromkeys(type(n.op).__name__ for n in holders)
    if axis != "tp" or not holders or any(is_built_in(n.op) or hasattr(n.op, "module") for n in holders):
        return ""
    entry = f'splits = {{"{dim}": Sharded("tp", "whole")}}'
    return f" ({' and '.join(f'{kind}.{entry}' for kind in kinds)} would keep it whole)"


def _heads(requirements: ModelRequirements) -> list[tuple[str, int]]:
    return requirements.sizes("tp", *({dim for _, dim in requirements.divided_sizes} - {"heads"}))


def _width(requirements: ModelRequirements) -> list[tuple[str, int]]:
    return requirements.sizes("tp", "heads", "kv_heads")


def _experts(requirements: ModelRequirements) -> list[tuple[str, int]]:
    return requirements.sizes("ep")


def allowed_tps(requirements: ModelRequirements) -> list[int]:
    """Return every tp that the rules of sizes allow."""
    common = divisors(*(size for _, size in (*_heads(requirements), *_width(requirements))))
    counts = [n for _, n in _shared_counts(requirements)]
    return [tp for tp in common if all(_divides_or_repeats(n, tp) for n in counts)]


def nearest_degrees(case: Case[Layout], degree: int, allowed: Iterable[int]) -> str:
    """Return the nearest of the allowed degrees that divide the number of devices, in words."""
    return nearest(degree, [n for n in allowed if case.cluster.count % n == 0])


def _shared_counts(requirements: ModelRequirements) -> list[tuple[str, int]]:
    """Return the (dim, size) pairs of dims of which several heads share one index."""
    groups = requirements.whole_sizes.get(("tp", "groups"), ())
    return [*(("kv_heads", n) for n in _kv_head_counts(requirements)), *(("groups", n) for n in groups)]


def _kv_head_counts(requirements: ModelRequirements) -> list[int]:
    """Return the numbers of key/value heads that differ from the number of query heads; `tp-heads` checks others."""
    heads = requirements.divided_sizes.get(("tp", "heads"), ())
    return [n for n in requirements.divided_sizes.get(("tp", "kv_heads"), ()) if n not in heads]


def _divides_or_repeats(kv_heads: int, tp: int | Column) -> Truth:
    return (kv_heads % tp == 0) | (tp % kv_heads == 0)


def _kv_heads(case: Case[L]) -> Truth:
    return all_of(_divides_or_repeats(n, case.layout.tp) for _, n in _shared_counts(case.requirements))


def _kv_heads_text(case: Case[Layout]) -> Words:
    tp = case.layout.tp
    dim, n = next((dim, n) for dim, n in _shared_counts(case.requirements) if not _divides_or_repeats(n, tp))
    message = f"tp {tp} neither divides {dim}={n} nor is divided by it"
    return message, f"use tp {nearest_degrees(case, tp, allowed_tps(case.requirements))}"


SIZE_RULES = (
    divides("tp-heads", "tp divides the attention heads.", "tp", "transformer_config.py:925", _heads),
    Rule(
        id="tp-kv-heads",
        sentence="tp divides the key/value heads and the groups of Mamba-2, or is divided by them (they are then "
        "repeated).",
        fix="use tp that divides them or is a multiple of them",
        owner=Owner.CORE,
        source="transformer_config.py:943",
        holds=_kv_heads,
        explain=_kv_heads_text,
    ),
    divides("tp-width", "tp divides the inner width of each dense layer.", "tp", "layers.py:842 and 1166", _width),
    divides("ep-experts", "ep divides the experts.", "ep", "moe_layer.py:101", _experts),
)
