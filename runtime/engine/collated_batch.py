"""Batches of Hugging Face collators: `input_ids` and `labels` with -100, by the names of a model's inputs.

As in transformers, labels of the next token stand at the token itself: they are shifted here. -100 becomes 0 in the
mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megaloom.dsl import DocumentIndices, DType, Graph, Node, UserError
from megaloom.runtime.data.labels import IGNORED
from megaloom.runtime.samples.objectives import Objective, objective_of
from megaloom.runtime.samples.samples import TYPE_INPUTS

IDS, TYPES, LABELS = "input_ids", "token_type_ids", "labels"


def of_collator(batch: Mapping[str, Any], graph: Graph) -> Mapping[str, Any]:
    """Return a batch of a collator by the names of the model's inputs; another batch as it is.

    `attention_mask` stays, and is compared with the model elsewhere. Raise UserError for a model that has no mask for
    positions without a label, or whose batches a collator cannot make.
    """
    inputs = [n for n in graph.nodes if n.is_input]
    if not isinstance(batch.get(IDS), Tensor) or any(n.name == IDS for n in inputs):
        return batch
    objective = objective_of(graph)
    texts = [n.name for n in inputs if _is_text(n, graph)]
    if objective is Objective.SPANS or not texts:
        raise UserError(
            f"a batch has {IDS}, and {graph.name} has no input of running text\n"
            f"give tensors by the names of its inputs: {', '.join(n.name for n in inputs)}"
        )
    out = {name: x for name, x in batch.items() if name not in (IDS, TYPES, LABELS)} | {texts[0]: batch[IDS]}
    out |= _types(batch.get(TYPES), inputs, graph)
    if batch.get(LABELS) is None:
        return out
    found = _labels(batch[LABELS], objective, inputs, graph)
    if twice := sorted(out.keys() & found.keys()):
        raise UserError(
            f"a batch has {', '.join(twice)} beside {IDS}, whose labels say what counts: {IGNORED} does not\n"
            f"omit {', '.join(twice)}, or give tensors by the names of the model's inputs"
        )
    return out | found


def _is_text(node: Node, graph: Graph) -> bool:
    """Return whether an input is the text that a model reads: ids that more than losses read, and no token types."""
    reads = node.value.dtype is DType.INDEX and node.name not in (*graph.only_for_losses, *TYPE_INPUTS)
    return reads and not isinstance(node.op, DocumentIndices)


def _types(types: Tensor | None, inputs: list[Node], graph: Graph) -> dict[str, Tensor]:
    """Return token types by their input. Raise UserError for types other than 0 that the model does not read."""
    if types is None:
        return {}
    if found := next((n.name for n in inputs if n.name in TYPE_INPUTS), None):
        return {found: types}
    if bool(types.any()):
        raise UserError(f"{TYPES} of a batch has types other than 0, and {graph.name} reads none\nomit them")
    return {}


def _labels(labels: Tensor, objective: Objective, inputs: list[Node], graph: Graph) -> dict[str, Tensor]:
    """Return the labels of a collator, and the mask of those that count, by their inputs."""
    own = [n for n in inputs if n.name in graph.only_for_losses]
    name = next((n.name for n in own if n.value.dtype is DType.INDEX), LABELS)
    mask = next((n.name for n in own if n.value.dtype is DType.MASK), None)
    if objective is Objective.NEXT:
        labels = torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), IGNORED)], 1)
    counted = labels != IGNORED
    if mask is not None:
        return {name: labels.where(counted, 0), mask: counted}
    if bool(counted.all()):
        return {name: labels}
    why = "the last position has none" if objective is Objective.NEXT else f"those of {IGNORED} do not count"
    raise UserError(
        f"labels beside {IDS} of a batch are a collator's, of which {why}, and the loss of {graph.name} has no mask\n"
        "declare NextToken(mask=mask()), or give --set conversations=true for a Hugging Face config.json"
    )
