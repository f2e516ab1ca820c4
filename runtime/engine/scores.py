"""Scores of a classification: the predicted and the given classes of a micro-batch, counted."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import frozen
from torch import Tensor

from megaloom.dsl import DType, Graph
from megaloom.runtime.samples.objectives import objective_of

ROWS = 3  # of counts by class: predicted rightly, predicted, given


@frozen
class Classifier:
    """The logits of classes in a model, and the inputs that have the classes and the mask of its loss."""

    logits: str
    labels: str
    mask: str | None
    classes: int

    @classmethod
    def of(cls, graph: Graph) -> Classifier | None:
        """Return the classifier that a model is; None if it predicts text."""
        if objective_of(graph).predicts_text or not graph.predictions:
            return None
        logits = graph.predictions[0]
        readers = (n for n in graph.nodes if n.is_loss and n.inputs[:1] == (logits,))
        inputs = [graph.nodes[graph.index[name]] for n in readers for name in n.inputs[1:]]
        given = [n for n in inputs if n.is_input]
        labels = next((n.name for n in given if n.value.dtype is DType.INDEX), None)
        mask = next((n.name for n in given if n.value.dtype is DType.MASK), None)
        vocab = graph.nodes[graph.index[logits]].shape["vocab"].known
        return None if labels is None else cls(logits, labels, mask, vocab)

    def counts(self, logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return how often each class is predicted rightly, predicted, and given, float64 [3, classes].

        logits: of whole sequences and all classes, in declared order. batch: the inputs of these sequences.
        """
        predicted = logits.argmax(-1).flatten()
        given = batch[self.labels].flatten()
        if self.mask is not None:
            counted = batch[self.mask].flatten() > 0
            predicted, given = predicted[counted], given[counted]
        each = (given[predicted == given], predicted, given)
        return torch.stack([torch.bincount(x, minlength=self.classes) for x in each]).double()
