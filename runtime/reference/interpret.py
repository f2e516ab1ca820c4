"""The oracle: evaluation of a whole model by its bodies, with plain torch, in one process.

The dims of every tensor are in the order of its `Value.shape`. The code is written for clarity, not for speed. The
modules that train a model are tested against it, and it is tested against Hugging Face and torch modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from megaloom.dsl import (
    Attend,
    Each,
    Gate,
    Input,
    Model,
    MoE,
    Node,
    Select,
    Shape,
    UserError,
    Value,
    Weight,
    graph,
)
from megaloom.dsl.node import primitives
from megaloom.runtime.ops import whole
from megaloom.runtime.ops.attention import attention
from megaloom.runtime.ops.balancing import mean_balance
from megaloom.runtime.ops.dropout_masks import MaskSource, dropout_rate, dropouts
from megaloom.runtime.ops.tensors import broadcast, dim_index, names


def interpret(
    model: Model,
    weights: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    *,
    masks: MaskSource | None = None,
    balancing: dict[str, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Return the model's outputs, which are differentiable.

    weights: by the names of `graph(model).weights`. inputs: by name. masks: of dropout, for these inputs as one
    micro-batch; None turns dropout off. balancing: receives the balancing loss of each mixture of experts, without its
    coefficient, by node. Raises UserError if a weight or an input is missing or has another shape.
    """
    g = graph(model)
    results: dict[str, Tensor] = {}
    for node in g.nodes:
        arguments = (a for a in node.value.args if not isinstance(a.op, Weight))
        known = {id(a): results[name] for a, name in zip(arguments, node.inputs, strict=True)}
        known |= {id(s.value): _given("weight", s.name, Shape(s.dims), weights) for s in node.weights}
        if isinstance(node.op, Input):
            known[id(node.value)] = _given("input", node.op.name, node.shape, inputs)
        results[node.name] = _value(node.value, known, node, None if masks is None else masks.of(node.name))
        if balancing is not None and isinstance(node.op, MoE) and node.op.balance:
            balancing[node.name] = _balancing_loss(node.op, node, known)
    return tuple(results[name] for name in g.outputs)


def _balancing_loss(op: MoE, node: Node, known: dict[int, Tensor]) -> Tensor:
    """Return the balancing loss of a node that was evaluated."""
    gate = next(v for v, *_ in primitives(node.value) if isinstance(v.op, Gate))
    order = ["batch", *names(gate.shape.without("batch", "experts")), "experts"]
    scores, weights = (broadcast(known[id(v)], v.shape, order).flatten(1, -2) for v in (gate.args[0], gate))
    return mean_balance(op, scores, weights != 0)


def _given(what: str, name: str, shape: Shape, values: Mapping[str, Tensor]) -> Tensor:
    """Return the tensor of this name. Raises UserError if there is none, or its sizes are not those of the shape."""
    if name not in values:
        raise UserError(f"no {what} {name!r} {shape}; the names given are {', '.join(values) or 'none'}")
    x = values[name]
    if len(shape.dims) != x.ndim or any(d.size not in (None, n) for d, n in zip(shape, x.shape, strict=True)):
        raise UserError(f"{what} {name!r} has shape {shape}, but the tensor given has sizes {list(x.shape)}")
    return x


def _value(v: Value, known: dict[int, Tensor], node: Node, masks: MaskSource | None) -> Tensor:
    """Return the tensor of a value inside a node. known: the tensors computed so far, by identity of the value."""
    if id(v) not in known:
        if isinstance(v.op, Each):
            known[id(v)] = _copies(v, known, node, masks)
        elif v.body is not None:
            known[id(v)] = _value(v.body, known, node, masks)
        else:
            args = [_value(a, known, node, masks) for a in v.args]
            known[id(v)] = whole(v.op, v, *args) if masks is None else _with_dropout(v, args, node, masks)
    return known[id(v)]


def _with_dropout(v: Value, args: list[Tensor], node: Node, masks: MaskSource) -> Tensor:
    """Return the value of a primitive in training: after dropout, if the primitive has one."""
    if not dropout_rate(v.op):
        return whole(v.op, v, *args)
    (number,) = (i for i, dropout in enumerate(dropouts(node.value)) if dropout is v)
    if isinstance(v.op, Attend):
        return attention(v.op, v, *args, dropped=partial(_drop, masks=masks, rate=v.op.dropout, number=number))
    return _drop(args[0], names(v.shape), masks=masks, rate=dropout_rate(v.op), number=number)


def _drop(x: Tensor, dims: Sequence[str], *, masks: MaskSource, rate: float, number: int) -> Tensor:
    """Return a tensor with these dims after dropout."""
    positions = (
        masks.samples(n, x.device) if name == "batch" else torch.arange(n, device=x.device)
        for name, n in zip(dims, x.shape, strict=True)
    )
    return masks.drop(x, rate, number, *positions)


def _copies(v: Value, known: dict[int, Tensor], node: Node, masks: MaskSource | None) -> Tensor:
    """Return the results of the copies of an `Each`, stacked: copy i reads index i of its weights."""
    assert isinstance(v.op, Each)
    assert v.body is not None
    x, dim = _value(v.args[0], known, node, masks), v.shape.dims[0]
    selects = [p for p, *_ in primitives(v) if p.op == Select(dim.name)]
    stacked_weights = [id(s.value) for s in node.weights if dim in s.outer]
    out = []
    for i in range(dim.known):
        of_copy = {**known, **{id(s): x.select(dim_index(v.args[0].shape, dim.name), i) for s in selects}}
        of_copy |= {w: known[w][i] for w in stacked_weights}
        out.append(_value(v.body, of_copy, node, masks))
    return torch.stack(out)
