"""The oracle: evaluation of a whole model by its bodies, with plain torch, in one process.

The dims of every tensor are in the order of its `Value.shape`. The code is written for clarity, not for speed. The
modules that train a model are tested against it, and it is tested against Hugging Face and torch modules.
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
from .tensors import dim_index


def interpret(model: Model, weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Return the model's outputs, which are differentiable. Dropout is off.

    weights: by the names of `graph(model).weights`. inputs: by name. Raises UserError if a weight or an input is
    missing or has another shape.
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
    """Return the tensor of this name. Raises UserError if there is none, or its sizes are not those of the shape."""
    if name not in values:
        raise UserError(f"no {what} {name!r} {shape}; the names given are {', '.join(values) or 'none'}")
    x = values[name]
    if len(shape.dims) != x.ndim or any(d.size not in (None, n) for d, n in zip(shape, x.shape, strict=True)):
        raise UserError(f"{what} {name!r} has shape {shape}, but the tensor given has sizes {list(x.shape)}")
    return x


def _value(v: Value, known: dict[int, Tensor], node: Node) -> Tensor:
    """Return the tensor of a value inside a node. known: the tensors computed so far, by identity of the value."""
    if id(v) not in known:
        if isinstance(v.op, Each):
            known[id(v)] = _copies(v, known, node)
        elif v.body is not None:
            known[id(v)] = _value(v.body, known, node)
        else:
            known[id(v)] = evaluate(v.op, v, *(_value(a, known, node) for a in v.args))
    return known[id(v)]


def _copies(v: Value, known: dict[int, Tensor], node: Node) -> Tensor:
    """Return the results of the copies of an `Each`, stacked: copy i reads index i of its weights."""
    assert isinstance(v.op, Each)
    assert v.body is not None
    x, dim = _value(v.args[0], known, node), v.shape.dims[0]
    selects = [p for p, *_ in primitives(v) if p.op == Select(dim.name)]
    stacked_weights = [id(s.value) for s in node.weights if dim in s.outer]
    out = []
    for i in range(dim.known):
        of_copy = {**known, **{id(s): x.select(dim_index(v.args[0].shape, dim.name), i) for s in selects}}
        of_copy |= {w: known[w][i] for w in stacked_weights}
        out.append(_value(v.body, of_copy, node))
    return torch.stack(out)
