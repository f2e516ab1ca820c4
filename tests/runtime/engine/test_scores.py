"""Scores of a classification: accuracy and macro F1 by counts of classes, with scikit-learn's numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn import metrics

from megaloom.dsl import graph
from megaloom.runtime.engine.results import Scores
from megaloom.runtime.engine.scores import Classifier
from megaloom.runtime.samples.objectives import objective_of
from tests.support.models.small import tiny_gpt, tiny_vit

CLASSES = 6


def scores(given: torch.Tensor, predicted: torch.Tensor, mask: torch.Tensor | None = None) -> Scores:
    """Return the scores of these classes, by counts of logits that are largest at the predicted ones."""
    classifier = Classifier("logits", "labels", None if mask is None else "mask", CLASSES)
    logits = torch.nn.functional.one_hot(predicted, CLASSES).float()
    batch = {"labels": given} if mask is None else {"labels": given, "mask": mask}
    return Scores.of(*classifier.counts(logits, batch).tolist())


def test_scores_by_hand() -> None:
    """Of class 0 two of three are right, of class 1 one of one, and class 2 is predicted once but not given."""
    found = scores(torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 2, 1]))
    assert found == Scores(3 / 4, (2 * 2 / (2 + 3) + 1 + 0) / 3)


@pytest.mark.parametrize("seed", range(3))
def test_scores_are_those_of_scikit_learn(seed: int) -> None:
    random = np.random.default_rng(seed)
    given, predicted = random.integers(CLASSES - 1, size=(4, 9)), random.integers(CLASSES, size=(4, 9))
    predicted = np.where(random.random((4, 9)) < 0.5, given, predicted)
    mask = random.random((4, 9)) < 0.7
    found = scores(*map(torch.from_numpy, (given, predicted, mask)))
    assert found.accuracy == pytest.approx(metrics.accuracy_score(given[mask], predicted[mask]))
    assert found.macro_f1 == pytest.approx(metrics.f1_score(given[mask], predicted[mask], average="macro"))


def test_classifiers_are_scored_and_models_of_text_are_not() -> None:
    found = Classifier.of(graph(tiny_vit()))
    assert found is not None and (found.labels, found.mask, found.classes) == ("labels", None, 11)
    assert not objective_of(graph(tiny_vit())).predicts_text
    assert Classifier.of(graph(tiny_gpt())) is None
