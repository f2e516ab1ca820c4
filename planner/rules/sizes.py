"""Rules of sizes: dims of the model that each axis must divide."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from megaloom.planner.model.requirements import ModelRequirements

from .divisors import divisors, nearest
from .rule import (
    Case,
    Owner,
    Rule,
    Truth,
    Words,
    all_of,
)

Sized = Callable[[ModelRequirements], list[tuple[str, int]]]


def _divides(id: str, sentence: str, axis: str, source: str, sized: Sized) -> Rule:
    """The rule that the degree of an axis divides some dims."""

    def holds(case: Case) -> Truth:
        degree = getattr(case.layout, axis)
        return all_of(size % degree == 0 for _, size in sized(case.requirements))

    def text(case: Case) -> Words:
        degree, dims = getattr(case.layout, axis), sized(case.requirements)
        dim, size = next((dim, size) for dim, size in dims if size % degree)
        works = _tps(case.requirements) if axis == "tp" else divisors(*(n for _, n in dims))
        return f"{axis} {degree} does not divide {dim}={size}", f"{axis} {_near(case, degree, works)} would"

    return Rule(id, sentence, f"{axis} that divides them all", Owner.CORE, source, holds, text)


def _heads(requirements: ModelRequirements) -> list[tuple[str, int]]:
    return requirements.sizes("tp", *({dim for _, dim in requirements.divided_sizes} - {"heads"}))


def _width(requirements: ModelRequirements) -> list[tuple[str, int]]:
    return requirements.sizes("tp", "heads", "kv_heads")


def _inner(requirements: ModelRequirements) -> list[tuple[str, int]]:
    return requirements.sizes("etp")


def _experts(requirements: ModelRequirements) -> list[tuple[str, int]]:
    return requirements.sizes("ep")


def _tps(requirements: ModelRequirements) -> list[int]:
    """Every tp that no rule here refuses."""
    whole = divisors(*(size for _, size in (*_heads(requirements), *_width(requirements))))
    few, keys = _few(requirements), _keys_of(requirements)
    return [tp for tp in whole if all(_repeats(n, tp) for n in few) and all(_divided(n, c, tp) for n, c in keys)]


def _near(case: Case, degree: int, works: Iterable[int]) -> str:
    """The nearest of these degrees that also divide the devices at hand."""
    return nearest(degree, [n for n in works if case.cluster.count % n == 0])


def _few(requirements: ModelRequirements) -> list[int]:
    """The numbers of key/value heads where these are fewer than query heads: else the rule of the heads says it."""
    heads = requirements.divided_sizes.get(("tp", "heads"), ())
    return [n for n in requirements.divided_sizes.get(("tp", "kv_heads"), ()) if n not in heads]


def _keys_of(requirements: ModelRequirements) -> list[tuple[int, int]]:
    """The same, each with the channels of one."""
    return [(n, c) for n, c in requirements.kv_heads if n in _few(requirements)]


def _repeats(kv_heads: int, tp: Any) -> Truth:
    return (kv_heads % tp == 0) | (tp % kv_heads == 0)


def _divided(kv_heads: int, channels: int, tp: Any) -> Truth:
    return 2 * kv_heads * channels % tp == 0


def _kv_heads(case: Case) -> Truth:
    return all_of(_repeats(n, case.layout.tp) for n in _few(case.requirements))


def _kv_heads_text(case: Case) -> Words:
    tp = case.layout.tp
    n = next(n for n in _few(case.requirements) if not _repeats(n, tp))
    message = f"tp {tp} neither divides kv_heads={n} nor is divided by it"
    return message, f"tp {_near(case, tp, _tps(case.requirements))} would"


def _keys(case: Case) -> Truth:
    return all_of(_divided(n, c, case.layout.tp) for n, c in _keys_of(case.requirements)) | (_kv_heads(case) == 0)


def _keys_text(case: Case) -> Words:
    tp = case.layout.tp
    n, c = next((n, c) for n, c in _keys_of(case.requirements) if not _divided(n, c, tp))
    message = f"tp {tp} does not divide the 2 x {n} x {c} = {2 * n * c} channels of keys and values"
    return message, f"tp {_near(case, tp, _tps(case.requirements))} would"


SIZE_RULES = (
    _divides("tp-heads", "tp divides the attention heads.", "tp", "transformer_config.py:925", _heads),
    Rule(
        "tp-kv-heads",
        "tp divides the key/value heads, or is divided by them (they are then repeated).",
        "tp that divides them or is a multiple of them",
        Owner.CORE,
        "transformer_config.py:943",
        _kv_heads,
        _kv_heads_text,
    ),
    Rule(
        "tp-keys",
        "tp divides the channels of all keys and values, 2 x kv_heads x head_dim, where it exceeds kv_heads.",
        "tp that divides them",
        Owner.CORE,
        "layers.py:842",
        _keys,
        _keys_text,
    ),
    _divides("tp-width", "tp divides the inner width of each dense layer.", "tp", "layers.py:842 and 1166", _width),
    _divides("etp-width", "etp divides the inner width of each expert.", "etp", "layers.py:842 and 1166", _inner),
    _divides("ep-experts", "ep divides the experts.", "ep", "moe_layer.py:101", _experts),
)
