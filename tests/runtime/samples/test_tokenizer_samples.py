"""Samples of tokenized text: masks and sentinels are the tokenizer's or above it; all depend on (seed, i) alone."""

import numpy as np
import pytest
import torch
from attrs import evolve

from megaloom.dsl import Graph, graph
from megaloom.runtime.data.data_split import Window
from megaloom.runtime.data.token_ids import TokenIds
from megaloom.runtime.samples.samples import Objective, SampleMaker
from tests.support.models.chat import chat_decoder
from tests.support.models.shared_weights import tiny_t5
from tests.support.models.small import tiny_bert

SEQ = 48
PLAIN = TokenIds(100, eos=0, name="x")
WITH_MASK = evolve(PLAIN, mask=7)
WITH_SPANS = evolve(PLAIN, sentinels=tuple(range(99, 59, -1)))


def window(length: int, low: int = 10, high: int = 60) -> Window:
    tokens = np.random.default_rng(3).integers(low, high, length)
    return Window(tokens, np.repeat(np.arange(4), -(-length // 4))[:length])


def made(g: Graph, ids: TokenIds, i: int = 5, seed: int = 1) -> dict[str, torch.Tensor]:
    maker = SampleMaker.of(g, SEQ, ids)
    text = window(maker.length)
    return maker.reading(text).make(torch.from_numpy(text.tokens), i, seed)


@pytest.mark.parametrize(("ids", "mask"), [(PLAIN, 100), (WITH_MASK, 7)])
def test_masked_tokens_have_the_tokenizers_mask(ids: TokenIds, mask: int) -> None:
    g = graph(tiny_bert())
    assert SampleMaker.of(g, SEQ, ids).needed_ids == 100 + (mask == 100)
    sample = made(g, ids)
    changed = sample["tokens"] != sample["labels"]
    assert (sample["tokens"] == mask).any()
    assert (sample["tokens"][changed & (sample["tokens"] != mask)] < ids.vocab).all()
    assert (changed <= sample["mask"]).all()


def test_removed_spans_have_the_tokenizers_sentinels() -> None:
    g = graph(tiny_t5())
    maker = SampleMaker.of(g, SEQ, WITH_SPANS)
    assert maker.objective is Objective.SPANS
    assert maker.needed_ids == 100
    without = SampleMaker.of(g, SEQ, PLAIN)
    assert without.needed_ids > 100
    sample, above = made(g, WITH_SPANS), made(g, PLAIN)
    target = sample["labels"][sample["mask"]].tolist()
    assert target.pop() == PLAIN.eos
    sentinels = [t for t in target if t >= 60]
    assert sentinels == list(WITH_SPANS.sentinels[: len(sentinels)])
    assert len(sentinels) == without.needed_ids - 100
    vocab = maker.vocab
    expected = [vocab - 1 - WITH_SPANS.sentinels.index(t) if t >= 60 else t for t in target]
    assert above["labels"][above["mask"]].tolist() == [*expected, PLAIN.eos]


@pytest.mark.parametrize("make", [tiny_bert, tiny_t5, chat_decoder])
def test_samples_depend_on_seed_and_number_alone(make) -> None:  # type: ignore[no-untyped-def]
    g = graph(make())
    first, again = made(g, PLAIN), made(g, PLAIN)
    assert all(torch.equal(first[name], again[name]) for name in first)
    if make is not chat_decoder:
        other = made(g, PLAIN, i=6), made(g, PLAIN, seed=2)
        assert not any(all(torch.equal(first[name], each[name]) for name in first) for each in other)


def test_document_indices_are_those_of_the_data() -> None:
    g = graph(chat_decoder())
    maker, text = SampleMaker.of(g, SEQ, PLAIN), window(SEQ + 1)
    counted = np.ones(SEQ + 1, np.bool_)
    counted[20:30] = False
    sample = maker.reading(evolve(text, counted=counted)).make(torch.from_numpy(text.tokens), 0, 1)
    assert sample["documents"].tolist() == text.documents[:-1].tolist()
    within = text.documents[1:] == text.documents[:-1]
    assert sample["mask"].tolist() == (within & counted[1:]).tolist()
