"""Copies of programs in which some values are replaced. Everything else is kept: ops, bodies, names."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

from attrs import evolve, fields

from megaloom.dsl.ops.weight import Input

from .layer import Layer, held_values
from .value import Value

Change = Callable[[Value, Value], Value]
"""Returns what stands for a value, from the value and from its copy with the new arguments, body and fields."""


def rewritten(outputs: Iterable[Value], change: Change, outside: Container[int] = ()) -> tuple[Value, ...]:
    """Return copies of these values, and of all that they are computed from, after `change`.

    outside: identities of values that stay as they are. A value that several others read is copied once.
    """
    roots, done = tuple(outputs), dict[int, Value]()
    todo = list(roots)
    while todo:  # without recursion: programs are deeper than Python's stack
        v = todo.pop()
        if id(v) in done:
            continue
        if id(v) in outside:
            done[id(v)] = v
            continue
        needs = (*held_values(v.op), *v.args, *(() if v.body is None else (v.body,)))
        missing = [a for a in needs if id(a) not in done]
        if missing:
            todo += [v, *missing]
        else:
            done[id(v)] = change(v, _copy(v, done))
    return tuple(done[id(v)] for v in roots)


def with_single_inputs(outputs: tuple[Value, ...]) -> tuple[Value, ...]:
    """Return values that read one input wherever they have read several of one name, shape and element type."""
    first: dict[tuple[Any, ...], Value] = {}
    repeated: dict[int, Value] = {}
    for v in _inputs(outputs):
        one = first.setdefault((v.op, v.shape, v.dtype), v)
        if one is not v:
            repeated[id(v)] = one
    return rewritten(outputs, lambda old, copy: repeated.get(id(old), copy)) if repeated else outputs


def _inputs(outputs: Iterable[Value]) -> Iterator[Value]:
    """Yield the inputs of a program, each once, those of its beginning first."""
    seen, todo = set[int](), list(outputs)
    found: list[Value] = []
    while todo:
        v = todo.pop()
        if id(v) in seen:
            continue
        seen.add(id(v))
        if isinstance(v.op, Input):
            found.append(v)
        todo += (*held_values(v.op), *v.args, *(() if v.body is None else (v.body,)))
    yield from reversed(found)


def with_values(it: Any, new: Callable[[Value], Value]) -> Any:
    """Return a layer, or what is in its fields, with `new(value)` for each value in them."""
    if isinstance(it, Value):
        return new(it)
    if isinstance(it, tuple):
        return tuple(with_values(x, new) for x in it)
    if isinstance(it, dict):
        return {name: with_values(x, new) for name, x in it.items()}
    if not isinstance(it, Layer):
        return it
    old = {f.name: getattr(it, f.name) for f in fields(type(it)) if f.init}
    changed = {name: y for name, x in old.items() if not _is_same(y := with_values(x, new), x)}
    if not changed:
        return it
    if not hasattr(it, "__attrs_init__"):
        return evolve(it, **changed)
    new = object.__new__(type(it))  # of a class with an __init__ of its own, such as WeightedSum
    new.__attrs_init__(**{**old, **changed})
    return new


def _copy(v: Value, done: Mapping[int, Value]) -> Value:
    args = tuple(done[id(a)] for a in v.args)
    body = None if v.body is None else done[id(v.body)]
    op = with_values(v.op, lambda x: done[id(x)])
    same = op is v.op and body is v.body and all(a is b for a, b in zip(args, v.args, strict=True))
    return v if same else evolve(v, op=op, args=args, body=body)


def _is_same(new: Any, old: Any) -> bool:
    """Return whether a field holds the values that it held."""
    if isinstance(old, tuple):
        return all(map(_is_same, new, old))
    if isinstance(old, dict):
        return all(_is_same(new[name], x) for name, x in old.items())
    return new is old
