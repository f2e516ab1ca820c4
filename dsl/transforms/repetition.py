"""`repeat`: a layer that is applied several times, with weights of its own each time or with one set of weights.

To share weights, those of the later iterations are replaced by those of the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping
from typing import ClassVar

from attrs import evolve, field, frozen

from megaloom.dsl.combine import Block
from megaloom.dsl.dims import MAX_LAYERS
from megaloom.dsl.errors import ShapeError
from megaloom.dsl.layer import Layer, chain, held_values, op_name
from megaloom.dsl.node import primitives
from megaloom.dsl.ops.weight import Weight
from megaloom.dsl.rewriting import rewritten
from megaloom.dsl.value import Value


@frozen
class Repeat(Layer):
    """A layer applied `times` times. Raises ShapeError if it changes the shape.

    Each time it has weights of its own; with `shared`, a name, all times have the same ones.
    """

    times: int = field()
    inner: Layer
    shared: str | None = None
    transparent: ClassVar[bool] = True

    @times.validator
    def _at_least_once(self, _: object, times: int) -> None:
        if isinstance(times, bool) or not isinstance(times, int) or times < 1:
            raise ShapeError(f"repeat needs a whole number of times, at least 1, got {times!r}")
        if times > MAX_LAYERS:
            raise ShapeError(f"repeat needs at most {MAX_LAYERS:,} times, got {times:,}")

    def body(self, x: Value, /, **side: Value) -> Value:
        weights: dict[str, Value] = {}
        for _ in range(self.times):
            y = Block(self.inner, at=self.at)(x, **side)
            if self.shared is not None:
                y, weights = self._with_weights(y, {id(v) for v in (x, *side.values())}, weights)
            if y.shape != x.shape:
                raise ShapeError(f"a repeated layer must keep the shape, but {x.shape} becomes {y.shape}")
            x = y
        return x

    def _with_weights(self, y: Value, given: set[int], weights: dict[str, Value]) -> tuple[Value, dict[str, Value]]:
        """Return an iteration that computes with the weights of the first, and these; if there are none, its own."""
        outside = given | {id(v) for v in held_values(self.inner)}
        own = _own_weights(y, outside, self.shared or "")
        weights = weights or {name: _renamed(w, name) for name, w in own.items()}
        return _replace_weights(y, outside, {id(w): weights[name] for name, w in own.items()}), weights

    def __str__(self) -> str:
        return f"repeat({self.times})" if self.shared is None else f"repeat({self.times}, shared={self.shared!r})"


def repeat(times: int, *layers: Layer, shared: str | None = None) -> Layer:
    """Return a layer that applies the chain of these layers `times` times, each time with its own weights.

    Each iteration is a block: the unit of full recompute. shared: all iterations share one set of weights, whose names
    begin with this one.
    """
    return Repeat(times, chain(*layers), shared)


def _own_weights(applied: Value, outside: Container[int], prefix: str) -> dict[str, Value]:
    """Return the weights that an applied layer has made, by name: PREFIX.LAYER.NUMBER.WEIGHT, in program order.

    outside: identities of the values that the layer was given. Raises ShapeError for weights of which each expert has
    its own.
    """
    out: dict[str, Value] = {}
    known, kinds = set[int](), Counter[str]()
    for v in _layers(applied, outside):
        name = op_name(v.op)
        for w, path, outer in primitives(v):
            if not isinstance(w.op, Weight) or id(w) in outside or id(w) in known:
                continue
            if outer:
                raise ShapeError(
                    f"iterations of a repeat cannot share {v.op}: it has weights for each of {outer[0]}\n"
                    "omit `shared`, so that each iteration has its own weights"
                )
            known.add(id(w))
            out[f"{prefix}.{name}.{kinds[name]}.{path}{w.op}"] = w
        kinds[name] += 1
    return out


def _renamed(w: Value, name: str) -> Value:
    """Return a weight with another name."""
    assert isinstance(w.op, Weight)
    return evolve(w, op=evolve(w.op, name=name))


def _replace_weights(applied: Value, outside: Container[int], new: Mapping[int, Value]) -> Value:
    """Return an applied layer that computes with other weights.

    outside: identities of the values that the layer was given. new: by the identity of the weight that each replaces.
    """
    (out,) = rewritten((applied,), lambda old, copy: new.get(id(old), copy), outside)
    return out


def _layers(applied: Value, outside: Container[int]) -> Iterator[Value]:
    """Yield the applied layers and primitives inside an applied layer, combinators looked through, in program order."""
    seen = set[int]()
    todo = [(applied, False)]
    while todo:
        v, ready = todo.pop()
        if id(v) in outside or isinstance(v.op, Weight) or (id(v) in seen and not ready):
            continue
        seen.add(id(v))
        inner = v.body if isinstance(v.op, Layer) and v.op.transparent else None
        if inner is not None:
            todo += [(inner, False), *((a, False) for a in reversed(v.args))]
        elif ready:
            yield v
        else:
            todo += [(v, True), *((a, False) for a in reversed(v.args))]
