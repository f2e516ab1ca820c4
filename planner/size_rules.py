"""The rules of the model's sizes: what each axis must divide evenly."""

from __future__ import annotations

from collections.abc import Callable

from .divisors import divisors, nearest
from .needs import Needs
from .rule import By, Case, Rule, Truth, Words, every

Sized = Callable[[Needs], list[tuple[str, int]]]


def _divides(id: str, sentence: str, axis: str, source: str, sized: Sized) -> Rule:
    """The rule that the degree of an axis divides some dims."""

    def holds(case: Case) -> Truth:
        degree = getattr(case.layout, axis)
        return every(size % degree == 0 for _, size in sized(case.needs))

    def told(case: Case) -> Words:
        degree, dims = getattr(case.layout, axis), sized(case.needs)
        dim, size = next((dim, size) for dim, size in dims if size % degree)
        works = nearest(degree, divisors(*(n for _, n in dims)))
        return f"{axis} {degree} does not divide {dim}={size}", f"{axis} {works} would"

    return Rule(id, sentence, f"{axis} that divides them all", By.CORE, source, holds, told)


def _heads(needs: Needs) -> list[tuple[str, int]]:
    return needs.of("tp", *({dim for _, dim in needs.sizes} - {"heads"}))


def _width(needs: Needs) -> list[tuple[str, int]]:
    return needs.of("tp", "heads", "kv_heads", "vocab")  # the vocabulary is padded by the runtime


def _inner(needs: Needs) -> list[tuple[str, int]]:
    return needs.of("etp")


def _experts(needs: Needs) -> list[tuple[str, int]]:
    return needs.of("ep")


def _uneven_heads(case: Case) -> list[tuple[int, Truth]]:
    """The numbers of key/value heads, each with whether tp divides or is divided by it."""
    tp, heads = case.layout.tp, case.needs.sizes.get(("tp", "heads"), ())
    sizes = case.needs.sizes.get(("tp", "kv_heads"), ())
    return [(n, (n % tp == 0) | (tp % n == 0)) for n in sizes if n not in heads]  # else the rule of the heads says it


def _kv_heads(case: Case) -> Truth:
    return every(truth for _, truth in _uneven_heads(case))


def _kv_heads_told(case: Case) -> Words:
    tp, size = case.layout.tp, next(n for n, truth in _uneven_heads(case) if not truth)
    works = [d for d in range(1, 4 * max(size, tp)) if size % d == 0 or d % size == 0]
    return f"tp {tp} neither divides kv_heads={size} nor is divided by it", f"tp {nearest(tp, works)} would"


def _shared(case: Case) -> list[tuple[int, int, Truth]]:
    """Key/value heads that are fewer than the query heads, their channels, and whether tp divides keys and values."""
    heads = case.needs.sizes.get(("tp", "heads"), ())
    return [(n, c, 2 * n * c % case.layout.tp == 0) for n, c in case.needs.keys if n not in heads]


def _keys(case: Case) -> Truth:
    return every(truth for _, _, truth in _shared(case)) | (_kv_heads(case) == 0)


def _keys_told(case: Case) -> Words:
    tp, (n, c) = case.layout.tp, next((n, c) for n, c, truth in _shared(case) if not truth)
    works = divisors(2 * n * c, *(size for _, size in _heads(case.needs)))
    return f"tp {tp} does not divide the 2 x {n} x {c} = {2 * n * c} channels of keys and values", (
        f"tp {nearest(tp, works)} would"
    )


RULES = (
    _divides("tp-heads", "tp divides the attention heads.", "tp", "transformer_config.py:925", _heads),
    Rule(
        "tp-kv-heads",
        "tp divides the key/value heads, or is divided by them (they are then repeated).",
        "tp that divides them or is a multiple of them",
        By.CORE,
        "transformer_config.py:943",
        _kv_heads,
        _kv_heads_told,
    ),
    Rule(
        "tp-keys",
        "tp divides the channels of all keys and values, 2 x kv_heads x head_dim, where it exceeds kv_heads.",
        "tp that divides them",
        By.CORE,
        "layers.py:842",
        _keys,
        _keys_told,
    ),
    _divides("tp-width", "tp divides the inner width of each dense layer.", "tp", "layers.py:842 and 1166", _width),
    _divides("etp-width", "etp divides the inner width of each expert.", "etp", "layers.py:842 and 1166", _inner),
    _divides("ep-experts", "ep divides the experts.", "ep", "moe_layer.py:101", _experts),
)
