"""The scripts on the systems that Megaloom grows out of, in their smallest forms: each number is its oracle's."""

import pytest

from megaloom.examples.scripts import (
    bert_tagger,
    gradient_reduction,
    labelled_runs,
    parallelism,
    pretrain_gpt2,
    strategy,
)


def test_a_strategy_changes_between_checkpoints() -> None:
    assert strategy.main(devices=4, count=2)


def test_each_kind_of_parallelism() -> None:
    assert parallelism.main("tensor and sequence")


@pytest.mark.parametrize("name", labelled_runs.CASES)
def test_models_of_labelled_data_are_scored_as_by_scikit_learn(name: str) -> None:
    assert labelled_runs.confirmed(name, steps=2, most=60)


def test_a_tagger_is_scored_as_by_scikit_learn() -> None:
    assert bert_tagger.main(steps=2, lines=200)


def test_gradients_are_reduced_as_by_one_process() -> None:
    assert gradient_reduction.main(gradient_reduction.RESHARDED, gradient_reduction.NAN)


def test_gpt2_is_trained_scored_and_generates_as_by_transformers() -> None:
    assert pretrain_gpt2.main(devices=4, steps=2, documents=60, ways=("greedy",))


def test_a_number_that_differs_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_reduction.plain_torch, "differ", lambda found, expected: 1e-3)
    assert not gradient_reduction.main("one synchronous all-reduce")
