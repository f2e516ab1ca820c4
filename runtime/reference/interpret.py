"""The oracle: a model's bodies evaluated with plain torch, in one process.

Every tensor carries its dims in the order of its `Value.shape`. Clarity comes before speed here: what trains a model
(`build`) is tested against this, and this is tested against the mathematics as others wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megaloom.dsl import (
    Each,
    Input,
    Model,
    Node,
    Select,
    Shape,
    UserError,
    Value,
    Weight,
    graph,
)
from megaloom.dsl.graph import primitives

from .evaluate import evaluate
from .tensors import axis


def interpret(model: Model, weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """The model's outputs for these weights (by the names of `graph(model).weights`) and inputs, differentiably.

    Dropout is off, as in evaluation. Raises UserError when a weight or an input is missing or of another shape.
    """
    g = graph(model)
    results: dict[str, Tensor] = {}
    for node in g.nodes:
        arguments = (a for a in node.value.args if not isinstance(a.op, Weight))
        known = {id(a): results[name] for a, name in zip(arguments, node.inputs, strict=True)}
        known |= {id(s.value): _given("weight", s.name, Shape(s.dims), weights) for s in node.weights}
        if isinstance(node.op, Input):
            known[id(node.value)] = _given("input", node.op.name, node.shape, inputs)
        results[node.name] = _value(node.value, known, node)
    return tuple(results[name] for name in g.outputs)


def _given(what: str, name: str, shape: Shape, values: Mapping[str, Tensor]) -> Tensor:
    """The tensor of this name, checked against the sizes that its shape has."""
    if name not in values:
        raise UserError(f"no {what} {name!r} {shape}: there are {', '.join(values) or 'none'}")
    x = values[name]
    if len(shape.dims) != x.ndim or any(d.size not in (None, n) for d, n in zip(shape, x.shape, strict=True)):
        raise UserError(f"{what} {name!r} is {shape}, so a tensor of sizes {list(x.shape)} cannot be it")
    return x


def _value(v: Value, known: dict[int, Tensor], node: Node) -> Tensor:
    """The tensor of a value inside a node; `known` holds what is computed already, by identity."""
    if id(v) not in known:
        if isinstance(v.op, Each):
            known[id(v)] = _copies(v, known, node)
        elif v.body is not None:
            known[id(v)] = _value(v.body, known, node)
        else:
            known[id(v)] = evaluate(v.op, v, *(_value(a, known, node) for a in v.args))
    return known[id(v)]


def _copies(v: Value, known: dict[int, Tensor], node: Node) -> Tensor:
    """Each copy of an `Each` computed for itself, with its own index of what it picks and of its weights."""
    assert isinstance(v.op, Each)
    assert v.body is not None
    x, dim = _value(v.args[0], known, node), v.shape.dims[0]
    picks = [p for p, *_ in primitives(v) if p.op == Select(dim.name)]
    copied = [id(s.value) for s in node.weights if dim in s.outer]
    out = []
    for i in range(dim.known):
        inside = {**known, **{id(p): x.select(axis(v.args[0].shape, dim.name), i) for p in picks}}
        inside |= {w: known[w][i] for w in copied}
        out.append(_value(v.body, inside, node))
    return torch.stack(out)
