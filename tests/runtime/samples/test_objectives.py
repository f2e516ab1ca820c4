"""Objectives: samples as pure functions, batches that are refused, and losses equal to those of the bodies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import field, frozen

from megaloom.dsl import (
    CrossEntropy,
    Graph,
    Layer,
    Model,
    NextToken,
    Sum,
    Value,
    apply,
    graph,
    labels,
    loss_sums,
    model,
    packed,
    token_weights,
    without_loss,
)
from megaloom.dsl.errors import UserError
from megaloom.examples.bart import bart_base
from megaloom.examples.gpt2 import gpt
from megaloom.examples.llava import clip, llava
from megaloom.examples.scripts import own_steps
from megaloom.examples.t5 import t5_small
from megaloom.planner.contract.layout import Layout
from megaloom.runtime.data.token_ids import BYTES
from megaloom.runtime.samples.sample_checks import check_sample
from megaloom.runtime.samples.samples import Sample, SampleMaker
from tests.support.limits import LIMIT
from tests.support.models.small import tiny_bert, tiny_gpt, tiny_llava, tiny_pair, tiny_vit
from tests.support.parity.rank_pool import Case, check, run_cases
from tests.support.paths import ROOT, TEST_MODELS

SEED, BATCH, SEQ = 7, 4, 32
TP2 = Layout(tp=2, sequence_parallel=True)
OWN = ROOT / "examples/scripts/own_loss.py"
RUN = {
    "masked tokens, TP2 SP": (f"{TEST_MODELS / 'small.py'}:tiny_bert", TP2),
    "masked tokens, CP2 PP2": (f"{TEST_MODELS / 'small.py'}:tiny_bert_pre_norm", Layout(cp=2, pp=2)),
    "classes, TP2 SP PP2": (f"{TEST_MODELS / 'small.py'}:tiny_vit", Layout(tp=2, sequence_parallel=True, pp=2)),
    "text after an image, CP2 PP2": (f"{TEST_MODELS / 'small.py'}:tiny_llava", Layout(cp=2, pp=2)),
    "an encoder and a decoder, TP2 SP PP2": (
        f"{TEST_MODELS / 'small.py'}:tiny_pair",
        Layout(tp=2, sequence_parallel=True, pp=2),
    ),
    "capped logits, padded vocabulary, TP2 SP": (f"{TEST_MODELS / 'small.py'}:tiny_gemma2", TP2),
    "z-loss, TP2 SP DP2": (f"{OWN}:with_z_loss", Layout(tp=2, sequence_parallel=True, dp=2)),
    "z-loss, CP2": (f"{OWN}:with_z_loss", Layout(cp=2)),
    "label smoothing, TP2 SP PP2": (f"{OWN}:with_label_smoothing", Layout(tp=2, sequence_parallel=True, pp=2)),
    "weights by id, CP2 TP2": (f"{OWN}:with_weighted_lines", Layout(cp=2, tp=2)),
}


def text(i: int, count: int, ids: int) -> torch.Tensor:
    """Return text i of random tokens."""
    return torch.randint(min(ids, BYTES), (count,), generator=torch.Generator().manual_seed(i))


def sample(g: Graph, i: int, seq: int = SEQ) -> Sample:
    """Return sample i of a model."""
    maker = SampleMaker.of(g, seq, synthetic=True)
    return maker.make(text(i, maker.length, maker.ids), i, SEED)


def test_layouts_compute_the_declared_losses_and_their_gradients(plan_of: Any) -> None:
    plans = {row: plan_of(ref, layout, batch=BATCH, seq=SEQ) for row, (ref, layout) in RUN.items()}
    check(run_cases([Case(row, plan.model, plan) for row, plan in plans.items()], 4, timeout=LIMIT))


@frozen
class OfSamples(Layer):
    """The sum of the cross-entropy of each sample."""

    labels: Value = field(factory=labels)

    def body(self, x: Value, /, **side: Value) -> Value:
        return loss_sums(apply(Sum(("seq",)), apply(CrossEntropy("vocab"), x, self.labels)))


def test_a_loss_is_a_mean_over_tokens_or_over_samples() -> None:
    logits = without_loss(tiny_gpt()).outputs[0]
    models = (tiny_gpt(), tiny_vit(), model("of-samples", logits >> OfSamples()))
    assert [SampleMaker.of(graph(m), SEQ).counted_word for m in models] == ["tokens", "samples", "samples"]
    assert [SampleMaker.of(graph(m), SEQ).unit for m in models] == ["nats per byte", "nats (classification)", ""]


def test_own_steps_train_on_pipeline_stages_and_on_shards_of_the_vocabulary() -> None:
    one, stages, shards = own_steps.main(pp=1), own_steps.main(pp=2), own_steps.main(tp=2)
    assert stages == pytest.approx(one, rel=1e-5)
    assert shards == pytest.approx(one, rel=1e-5)
    assert len(set(one)) == 3


@pytest.mark.parametrize("make", [tiny_gpt, tiny_bert, tiny_vit, t5_small], ids=lambda make: make.__name__)
def test_samples_are_pure_functions_of_seed_and_index(make: Any) -> None:
    g = graph(make())
    first, second, other = sample(g, 3), sample(g, 3), sample(g, 4)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    check_sample(g, first, SEQ)


def test_masked_tokens_are_the_labels() -> None:
    x = sample(graph(tiny_bert()), 1, seq=512)
    changed = x["tokens"] != x["labels"]
    assert not (changed & ~x["mask"]).any()
    assert 0.1 < x["mask"].float().mean() < 0.2
    assert 0.7 < (x["tokens"][x["mask"]] == 130).float().mean() < 0.9  # the last id is the mask's


def test_token_types_are_zero_because_the_data_have_no_pairs() -> None:
    maker = SampleMaker.of(graph(tiny_bert()), SEQ)
    assert maker.make(text(1, maker.length, maker.ids), 1, SEED)["types"].unique().tolist() == [0]


def test_removed_spans_and_the_rest_are_the_text() -> None:
    g = graph(t5_small())
    maker, x = SampleMaker.of(g, 64), sample(g, 1, seq=64)
    target = x["labels"][x["mask"]].tolist()
    assert x["tokens"].tolist()[: len(target)] == [0, *target[:-1]]
    sentinels = [t for t in target if t >= BYTES]
    assert sentinels == [32127 - k for k in range(len(sentinels))]
    assert target[-2:] == [sentinels[-1], 0]  # the last sentinel, and the end, which is 0 for bytes
    assert (x["source_tokens"] >= BYTES).sum() == len(sentinels) - 1
    assert x["source_tokens"][-1] == 0
    removed = {s: target[target.index(s) + 1 :] for s in sentinels}
    whole: list[int] = []
    for t in x["source_tokens"].tolist():
        after = removed.get(t)
        stop = next((i for i, u in enumerate(after) if u >= BYTES), len(after)) if after is not None else 0
        whole += [t] if after is None else after[:stop]
    assert whole[:-1] == text(1, maker.length, maker.ids).tolist()[: len(whole) - 1]
    assert maker.length - len(whole) < 2


def test_a_decoder_starts_with_the_token_that_its_loss_declares() -> None:
    x = sample(graph(bart_base()), 1)
    target = x["labels"][x["mask"]].tolist()
    assert x["tokens"].tolist() == [2, *target, *[1] * (SEQ - len(target))][:SEQ]
    assert x["labels"].tolist() == [*target, *[1] * (SEQ - len(target))]


def test_text_after_an_image_counts() -> None:
    g = graph(llava("small", clip(1, 2, 16, 32, patch=4, pixels=8), 1, 2, 16, 32, vocab=300, token=299))
    x = sample(g, 1)
    assert (x["tokens"] == 299).sum() == 4
    assert x["mask"].tolist() == [False] * 3 + [True] * (SEQ - 3)
    assert x["image"].shape == (3, 8, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": None}, "a sample lacks mask; tiny-bert has the inputs"),
        ({"other": torch.zeros(SEQ)}, "a sample has other; tiny-bert has the inputs"),
        (
            {"tokens": torch.zeros(SEQ + 1, dtype=torch.int64)},
            r"tokens of a sample has the shape \[33\]: .* needs \[32\]",
        ),
        ({"tokens": torch.zeros(SEQ)}, "tokens of a sample is torch.float32: it must be int64 ids"),
        ({"tokens": torch.full((SEQ,), 131)}, "tokens of a sample has the id 131: tiny-bert has ids below 131 there"),
        ({"types": torch.full((SEQ,), 2)}, "types of a sample has the id 2: tiny-bert has ids below 2 there"),
        ({"labels": torch.full((SEQ,), 131)}, "labels of a sample has the id 131"),
        ({"mask": torch.zeros(SEQ, dtype=torch.bool)}, "mask of a sample has no 1"),
        ({"labels": torch.full((SEQ,), -100)}, "labels of a sample has the id -100: ids are 0 or more"),
        ({"mask": torch.full((SEQ,), 2)}, "mask of a sample has numbers other than 0 and 1"),
        ({"mask": [1] * SEQ}, "mask of a sample is a list: it must be a tensor"),
    ],
)
def test_a_bad_sample_is_refused_before_the_step(change: dict[str, Any], message: str) -> None:
    g = graph(tiny_bert())
    bad = {name: x for name, x in {**sample(g, 0), **change}.items() if x is not None}
    with pytest.raises(UserError, match=message):
        check_sample(g, bad, SEQ)


def weighted_gpt() -> Model:
    """A decoder with weights of tokens."""
    logits = without_loss(tiny_gpt()).outputs[0]
    return model("weighted-gpt", logits >> NextToken(weights=token_weights()))


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (tiny_vit, {"image": torch.zeros(3, 8, 9)}, r"image of a sample has the shape \[3, 8, 9\]"),
        (tiny_vit, {"labels": torch.zeros(SEQ).long()}, r"labels of a sample has the shape \[32\]"),
        (tiny_vit, {"image": torch.full((3, 12, 12), torch.nan)}, "image of a sample has a number that is NaN"),
        (tiny_vit, {"image": torch.zeros(3, 12, 12).long()}, "image of a sample is torch.int64: it must be floating"),
        (weighted_gpt, {"weights": torch.full((SEQ,), -1.0)}, "weights of a sample has a negative weight"),
        (weighted_gpt, {"weights": torch.zeros(SEQ)}, "weights of a sample has a negative weight or none above 0"),
        (lambda: packed(tiny_gpt()), {"documents": -torch.arange(SEQ)}, "documents of a sample has decreasing indices"),
        (
            lambda: packed(gpt("short", layers=1, heads=2, embed=16, vocab=127, seq=8)),
            {"documents": torch.arange(SEQ) // 9},
            "documents of a sample has a document of 9 tokens: positions.0 has 8 positions",
        ),
    ],
)
def test_bad_numbers_are_refused_before_the_step(make: Any, change: dict[str, Any], message: str) -> None:
    g = graph(make())
    good = sample(g, 0)
    with pytest.raises(UserError, match=message):
        check_sample(g, {**good, **change}, SEQ)


def test_tokens_that_do_not_line_up_with_the_image_are_refused_before_the_step() -> None:
    g = graph(tiny_llava())
    whole = sample(g, 0)
    check_sample(g, whole, SEQ)
    fewer = torch.where(torch.arange(SEQ) == 3, 7, whole["tokens"])
    with pytest.raises(UserError, match="tokens of a sample has the id 298 8 times: it stands for the 9 vectors"):
        check_sample(g, {**whole, "tokens": fewer}, SEQ)


def test_a_source_has_the_length_that_the_model_declares() -> None:
    g = graph(tiny_pair())
    x = sample(g, 3)
    assert (x["source_tokens"].shape, x["tokens"].shape, x["labels"].shape) == ((24,), (SEQ,), (SEQ,))
    check_sample(g, x, SEQ)
