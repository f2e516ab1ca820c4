"""Checks of samples before a step: a clear message for tensors that the model cannot train on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megaloom.dsl import DocumentIndices, DocumentPositions, DType, Graph, Lookup, MaskedScatter, Node
from megaloom.dsl.errors import UserError
from megaloom.dsl.facts.primitives import program


def check_sample(graph: Graph, sample: Mapping[str, Any], seq: int, *, more: bool = False) -> None:
    """Raise UserError unless a sample has the names, shapes and types of the model's inputs, and ids in its tables.

    more: the sample may have tensors of other names, which steps of the user's own read.
    """
    inputs = {n.name: n for n in graph.nodes if n.is_input}
    if missing := sorted(inputs.keys() - sample.keys()):
        raise UserError(f"a sample lacks {', '.join(missing)}; {graph.name} has the inputs {', '.join(inputs)}")
    if (extra := sorted(sample.keys() - inputs.keys())) and not more:
        raise UserError(
            f"a sample has {', '.join(extra)}; {graph.name} has the inputs {', '.join(inputs)} only\n"
            "a training_step or validation_step of your own may read more tensors: give steps that have one"
        )
    for name in extra:
        if not isinstance(sample[name], Tensor):
            raise UserError(f"{name} of a sample is a {type(sample[name]).__name__}: it must be a tensor")
    for name, node in inputs.items():
        x, want = sample[name], [d.size or seq for d in node.shape if d.name != "batch"]
        if not isinstance(x, Tensor):
            raise UserError(f"{name} of a sample is a {type(x).__name__}: it must be a tensor")
        if list(x.shape) != want:
            raise UserError(f"{name} of a sample has the shape {list(x.shape)}: {node.shape} needs {want}")
        _check_numbers(graph, node, x)
    _check_image_tokens(graph, sample)


def _check_image_tokens(graph: Graph, sample: Mapping[str, Tensor]) -> None:
    """Raise UserError unless the tokens of a sample have the id that an image replaces once for each vector."""
    for node in graph.nodes:
        names = {id(v.source): name for v, name in zip(program(node).inputs, node.inputs, strict=True)}
        for v in (step.value for step in program(node).steps):
            if isinstance(v.op, MaskedScatter) and (name := names.get(id(v.args[2].source), "")) in sample:
                vectors, found = v.args[1].shape.positions("embed").known, int((sample[name] == v.op.token).sum())
                if found != vectors:
                    raise UserError(
                        f"{name} of a sample has the id {v.op.token} {found} times: it stands for the {vectors} "
                        "vectors of an image, once for each"
                    )


def _check_numbers(graph: Graph, node: Node, x: Tensor) -> None:
    """Raise UserError unless the numbers of an input have its type and range."""
    where = f"{node.name} of a sample"
    match node.value.dtype:
        case DType.INDEX:
            if x.is_floating_point() or x.is_complex() or x.dtype is torch.bool:
                raise UserError(f"{where} is {x.dtype}: it must be int64 ids")
            if isinstance(node.op, DocumentIndices):
                _check_documents(graph, node, x)
            else:
                _check_ids(graph, node, x)
        case DType.MASK:
            if not bool(((x == 0) | (x == 1)).all()):
                raise UserError(f"{where} has numbers other than 0 and 1\ngive weights by token_weights()")
            if not bool(x.any()):
                raise UserError(f"{where} has no 1, so that nothing of it counts: mark at least one position")
        case _:
            if not x.is_floating_point():
                raise UserError(f"{where} is {x.dtype}: it must be floating-point numbers")
            if not bool(x.isfinite().all()):
                raise UserError(f"{where} has a number that is NaN or infinite")
            if node.value.dtype is DType.FLOAT32 and not (bool((x >= 0).all()) and bool(x.any())):
                raise UserError(f"{where} has a negative weight or none above 0: weights are 0 or more, some above 0")


def _check_ids(graph: Graph, node: Node, x: Tensor) -> None:
    """Raise UserError unless ids are rows of all tables that they look up."""
    if not x.numel():
        return
    if (least := int(x.min())) < 0:
        raise UserError(f"{node.name} of a sample has the id {least}: ids are 0 or more\nhide positions with a mask")
    if (rows := table_rows(graph, node)) and int(x.max()) >= rows:
        raise UserError(f"{node.name} of a sample has the id {int(x.max())}: {graph.name} has ids below {rows} there")


def _check_documents(graph: Graph, node: Node, x: Tensor) -> None:
    """Raise UserError unless documents follow one another, and fit the learned positions that restart at each."""
    if bool((x.diff() < 0).any()):
        raise UserError(f"{node.name} of a sample has decreasing indices: the tokens of a document follow one another")
    longest = int(x.unique_consecutive(return_counts=True)[1].max())
    for reader in (n for n in graph.nodes if node.name in n.inputs):
        for step in program(reader).steps:
            first = step.value.args[0].source.op if step.value.args else None
            if isinstance(step.value.op, Lookup) and isinstance(first, DocumentPositions):
                rows = step.value.args[1].shape[step.value.op.key].known - first.first
                if longest > rows:
                    raise UserError(
                        f"{node.name} of a sample has a document of {longest} tokens: {reader.name} has "
                        f"{rows} positions\ncut documents into parts of {rows} tokens at most"
                    )


def table_rows(graph: Graph, node: Node) -> int | None:
    """Return the rows of the smallest table that looks up the ids of an input, or the classes of its logits."""
    rows = []
    for reader in (n for n in graph.nodes if node.name in n.inputs):
        p = program(reader)
        entering = {id(v.source) for v, name in zip(p.inputs, reader.inputs, strict=True) if name == node.name}
        for step in p.steps:
            key = getattr(step.value.op, "key", None) or getattr(step.value.op, "over", None)
            if any(id(a.source) in entering for a in step.value.args) and isinstance(key, str):
                rows += [a.shape[key].known for a in step.value.args if key in a.shape]
    return min(rows, default=None)


def stacked(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the named tensors of some samples, [samples ..]. Raise UserError if names or shapes differ."""
    shapes = [{name: list(x.shape) for name, x in sample.items()} for sample in samples]
    if other := next((s for s in shapes if s != shapes[0]), None):
        names = [name for name in {**shapes[0], **other} if shapes[0].get(name) != other.get(name)]
        found = "; ".join(
            f"{name} is {shapes[0].get(name, 'absent')} and {other.get(name, 'absent')}" for name in names
        )
        raise UserError(f"the samples of a micro-batch have tensors of different names or shapes: {found}")
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
