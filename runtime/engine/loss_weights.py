"""Sums of the weights of each loss over a global batch, known before the step because they depend on the data alone.

With several losses training minimises sum of coefficient * (loss sum / weight sum). So each loss sum must be divided by
a weight sum of its own, which no micro-batch knows by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

from megaloom.dsl import Graph, Input, LossSums, Node, Value, Weight
from megaloom.dsl.errors import UserError
from megaloom.dsl.node import primitives
from megaloom.runtime.ops import whole


def weight_sums(graph: Graph, names: Iterable[str], batch: dict[str, Tensor]) -> Tensor:
    """Return the weight sum of each of these losses over whole sequences, float64 [losses].

    batch: by the names of the inputs, [batch ..]. Raise UserError if weights depend on anything but the data.
    """
    sizes = _input_sizes(graph, batch)
    sums = [_weight_sum(graph.nodes[graph.index[name]], batch, sizes) for name in names]
    return torch.tensor(sums, dtype=torch.float64)


def _weight_sum(node: Node, batch: dict[str, Tensor], sizes: dict[str, int]) -> float:
    ends = [v for v, *_ in primitives(node.value) if isinstance(v.op, LossSums)]
    if len(ends) != 1:
        raise UserError(
            f"{node.name} must end in one loss_sums(losses, weights), because the model has several losses or a "
            "balancing loss of experts"
        )
    losses, *weights = ends[0].args
    known: dict[int, Tensor] = {}
    if weights:
        (x,) = (_value(w, node, batch, known).double() for w in weights)
        missing = [d for d in losses.shape if d not in weights[0].shape.dims]
    else:
        x, missing = torch.ones((), dtype=torch.float64), list(losses.shape)
    return float(x.sum()) * prod(sizes[d.name] if d.size is None else d.size for d in missing)


def _input_sizes(graph: Graph, batch: dict[str, Tensor]) -> dict[str, int]:
    """Return the sizes of the dims of the inputs, as a batch has them."""
    inputs = [n for n in graph.nodes if n.is_input and n.name in batch]
    return {d.name: size for n in inputs for d, size in zip(n.shape, batch[n.name].shape, strict=True)}


def _value(v: Value, node: Node, batch: dict[str, Tensor], known: dict[int, Tensor]) -> Tensor:
    """Return the tensor of a value that is made of inputs alone."""
    if id(v) not in known:
        if isinstance(v.op, Input):
            known[id(v)] = batch[v.op.name]
        elif isinstance(v.op, Weight):
            raise UserError(
                f"the weights of {node.name} depend on the model's weight {v.op.name!r}; if a model has several losses "
                "or a balancing loss of experts, weights of losses must be computed from inputs alone"
            )
        elif v.body is not None:
            known[id(v)] = _value(v.body, node, batch, known)
        else:
            known[id(v)] = whole(v.op, v, *(_value(a, node, batch, known) for a in v.args))
    return known[id(v)]
