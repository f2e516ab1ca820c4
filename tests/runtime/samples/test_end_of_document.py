"""Options for end-of-document tokens: masks, documents and positions are those of megatron-core, element by element."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from megaloom.dsl import (
    MLP,
    Attention,
    Dim,
    Embed,
    LayerNorm,
    Model,
    NextToken,
    Positions,
    Unembed,
    graph,
    ids,
    mask,
    model,
    packed,
    residual,
    weight,
    without_loss,
)
from megaloom.dsl.errors import UserError
from megaloom.runtime.data.token_ids import BYTE_IDS
from megaloom.runtime.engine.megatron_batch import as_inputs, as_sample
from megaloom.runtime.megatron import device
from megaloom.runtime.ops.tensors import document_positions
from megaloom.runtime.samples.end_of_document import EndOfDocument
from megaloom.runtime.samples.samples import SampleMaker
from tests.support.models.small import tiny_bert, tiny_gpt, tiny_llama, tiny_pair

device.prepare()

from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids  # noqa: E402

SEQ, EOD = 12, 0
TEXTS = torch.tensor(
    [
        [5, 6, 0, 7, 8, 9, 0, 0, 3, 4, 5, 6, 7],
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 7, 0],
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 7, 6, 5],
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 7, 0, 5],
    ]
)
ALL = EndOfDocument(reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
ATTENTION = EndOfDocument(reset_attention_mask=True)
POSITIONS = EndOfDocument(reset_position_ids=True, reset_attention_mask=True)
LOSS = EndOfDocument(eod_mask_loss=True)


def decoder(*, restart: bool = True) -> Model:
    """Learned positions, and a mask of the loss."""
    wte, wpe = weight("wte", Dim("vocab", 32), Dim("embed", 16)), weight("wpe", Dim("position", SEQ), Dim("embed", 16))
    block = residual(LayerNorm(), Attention(heads=2, kv_heads=2)) >> residual(LayerNorm(), MLP(16))
    x = ids() >> Embed(wte) >> Positions(wpe, restart=restart) >> block
    return model("decoder", x >> LayerNorm() >> Unembed(wte) >> NextToken(mask=mask()))


def megatron(text: torch.Tensor, ends: EndOfDocument) -> dict[str, torch.Tensor]:
    """Return a sample of megatron-core's GPTDataset."""
    options = (ends.reset_position_ids, ends.reset_attention_mask, ends.eod_mask_loss, True)
    hidden, counted, positions = _get_ltor_masks_and_position_ids(text[:-1], EOD, *options)
    sample = {"tokens": text[:-1], "labels": text[1:], "loss_mask": counted}
    return {**sample, "position_ids": positions, "attention_mask": hidden}


CASES: dict[str, tuple[Model, EndOfDocument]] = {
    "all": (packed(decoder()), ALL),
    "attention and positions": (packed(decoder()), POSITIONS),
    "attention": (packed(decoder(restart=False)), ATTENTION),
    "attention and loss": (packed(decoder(restart=False)), evolve(ATTENTION, eod_mask_loss=True)),
    "loss": (decoder(), LOSS),
    "nothing": (decoder(), EndOfDocument()),
}


@pytest.mark.parametrize("case", CASES)
def test_samples_are_those_of_megatron_core(case: str) -> None:
    m, ends = CASES[case]
    ends.check(graph(m))
    maker = SampleMaker.of(graph(m), SEQ, BYTE_IDS)
    maker = evolve(maker, ends=ends)
    for text in TEXTS:
        ours, theirs = maker.make(text, 0, 0), megatron(text, ends)
        assert torch.equal(ours["tokens"], theirs["tokens"])
        assert torch.equal(ours["labels"], theirs["labels"])
        assert torch.equal(ours["mask"].float(), theirs["loss_mask"])
        documents = ours.get("documents", torch.zeros(SEQ, dtype=torch.int64))
        reads = (documents[:, None] == documents).tril()
        assert torch.equal(~reads, theirs["attention_mask"][0])
        positions = document_positions(documents[None])[0] if ends.reset_position_ids else torch.arange(SEQ)
        assert torch.equal(positions, theirs["position_ids"])


@pytest.mark.parametrize("case", CASES)
def test_batches_of_megatron_core_are_inputs_of_the_model(case: str) -> None:
    m, ends = CASES[case]
    g, samples = graph(m), [megatron(text, ends) for text in TEXTS]
    maker = evolve(SampleMaker.of(g, SEQ, BYTE_IDS), ends=ends)
    ours = [maker.make(text, 0, 0) for text in TEXTS]
    batch = as_inputs({name: torch.stack([s[name] for s in samples]) for name in samples[0]}, g, SEQ)
    assert batch.keys() == ours[0].keys()
    for i, (want, sample) in enumerate(zip(ours, samples, strict=True)):
        assert all(torch.equal(batch[name][i].to(x.dtype), x) for name, x in want.items())
        assert all(torch.equal(x.to(want[name].dtype), want[name]) for name, x in as_sample(sample, g, SEQ).items())
    assert as_inputs(dict.fromkeys(samples[0]), g, SEQ) is None
    assert as_inputs(None, g, SEQ) is None


def refusal(call: Any) -> str:
    """Return the message with which a call is refused."""
    with pytest.raises(UserError) as raised:
        call()
    return str(raised.value)


WRONG = {
    "positions alone": (decoder(), EndOfDocument(reset_position_ids=True), "--reset-position-ids without --reset-att"),
    "no mask": (tiny_gpt(), LOSS, "the loss of tiny-gpt has no mask\ngive --set conversations=true"),
    "not packed": (decoder(), ATTENTION, "decoder has no document indices, so its attention reads the whole sequence"),
    "packed": (packed(decoder()), LOSS, "--eod-mask-loss without --reset-attention-mask: decoder is packed"),
    "restarts": (packed(decoder()), ATTENTION, "the learned positions of decoder restart at each document"),
    "along": (packed(decoder(restart=False)), ALL, "the learned positions of decoder count along the whole sequence"),
    "token alone": (decoder(), EndOfDocument(eod_token=3), "--eod-token 3 has no effect alone"),
}


@pytest.mark.parametrize("case", WRONG)
def test_options_that_the_model_does_not_compute_are_refused(case: str) -> None:
    m, ends, words = WRONG[case]
    assert words in refusal(lambda: ends.check(graph(m)))


def test_an_unknown_token_is_refused() -> None:
    assert ALL.token(7, "a tokenizer") == 7
    assert evolve(ALL, eod_token=0).token(7, "a tokenizer") == 0
    assert "the end-of-document token of wiki is not known\ngive its id with --eod" in refusal(
        lambda: ALL.token(None, "wiki")
    )
    POSITIONS.check(graph(packed(tiny_llama())))  # distances need no restart
    ATTENTION.check(graph(packed(tiny_llama())))


def changed(**other: Any) -> dict[str, Any]:
    """Return a batch of megatron-core with other tensors."""
    samples = [megatron(text, ALL) for text in TEXTS]
    return {**{name: torch.stack([s[name] for s in samples]) for name in samples[0]}, **other}


def twice_masked() -> Model:
    """Return a decoder with two losses, each with a mask of its own."""
    logits = without_loss(decoder()).outputs[0]
    losses = [logits >> NextToken(mask=mask(name)) for name in ("first", "second")]
    return model("twice", losses[0] + losses[1])


CAUSAL = torch.ones(4, 1, SEQ, SEQ).tril() < 0.5
ALONG = torch.arange(SEQ).expand(4, SEQ)
TEXT = torch.tensor([[1] * 9 + [0] * 3] * 4)
PACKED, PLAIN = packed(decoder()), decoder()
REFUSED: dict[str, tuple[Model, dict[str, Any], str]] = {
    "attention of a model that is not packed": (PLAIN, changed(), "attention_mask of a batch keeps documents apart"),
    "positions of another mask": (PACKED, changed(attention_mask=CAUSAL), "position_ids of a batch do not count fr"),
    "no mask says where": (PACKED, changed(attention_mask=None), "neither attention_mask nor document indices say"),
    "positions along": (PACKED, changed(position_ids=ALONG), "position_ids of a batch do not restart at each"),
    "positions restart": (packed(decoder(restart=False)), changed(), "decoder count along each sequence"),
    "odd positions": (packed(tiny_llama()), changed(position_ids=2 * ALONG, loss_mask=None), "count neither along"),
    "inverted": (PACKED, changed(attention_mask=~CAUSAL), "of sequence 0 of a batch is no causal mask of whole docu"),
    "numbers": (PACKED, changed(attention_mask=CAUSAL.float()), "is torch.float32: it must be bool, True where"),
    "shape": (PACKED, changed(attention_mask=CAUSAL[:, 0]), "attention_mask of a batch has the shape [4, 12, 12]"),
    "length": (PACKED, changed(loss_mask=torch.ones(4, 3)), "loss_mask of a batch has the shape [4, 3]"),
    "loss without a mask": (packed(tiny_gpt()), changed(), "the loss of tiny-gpt has no mask"),
    "two masks": (PACKED, changed(mask=torch.ones(4, SEQ)), "loss_mask and mask of a batch differ: give one"),
    "two documents": (PACKED, changed(documents=ALONG), "attention_mask and documents of a batch tell of different"),
    "several masks": (twice_masked(), changed(attention_mask=None), "is one mask, and twice has first, second\ngive"),
    "half a batch": (PACKED, changed(labels=None), "a batch has None for labels, and tensors of other names"),
    "a list": (PACKED, changed(loss_mask=[1]), "loss_mask of a batch is a list: it must be a tensor"),
    "padding at the front": (PACKED, changed(attention_mask=1 - TEXT), "must be 1 for text, then 0 for padding"),
    "padding that counts": (PLAIN, changed(attention_mask=TEXT, position_ids=None), "decoder's loss would count it"),
    "padding of an encoder": (tiny_bert(), {"tokens": ALONG, "attention_mask": TEXT}, "attention would read it"),
    "two kinds of attention": (tiny_pair(), {"tokens": ALONG, "attention_mask": CAUSAL}, "causal and other attention"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tensors_that_are_not_what_the_model_does_are_refused(case: str) -> None:
    m, batch, words = REFUSED[case]
    assert words in refusal(lambda: as_inputs(batch, graph(m), SEQ))


def test_padding_of_a_collator_is_a_document_of_its_own_or_is_not_counted() -> None:
    tokens = {"tokens": TEXTS[:, :-1], "labels": TEXTS[:, 1:]}
    padded = as_inputs({**tokens, "mask": TEXT, "attention_mask": TEXT}, graph(PACKED), SEQ)
    assert torch.equal(padded["documents"], 1 - TEXT)
    plain = as_inputs({**tokens, "loss_mask": TEXT, "attention_mask": TEXT}, graph(PLAIN), SEQ)
    assert plain.keys() == {"tokens", "labels", "mask"}
    whole = as_inputs({**tokens, "attention_mask": torch.ones_like(TEXT)}, graph(tiny_gpt()), SEQ)
    assert whole.keys() == tokens.keys()
    own = as_inputs({**tokens, "loss_mask": TEXT}, graph(tiny_gpt()), SEQ, more=True)
    assert own.keys() == {*tokens, "loss_mask"}  # a step of the user's own reads it


def test_batches_of_collators_are_shifted_and_masked() -> None:
    labels = TEXTS[:, :-1].where(TEXT == 1, -100)
    batch = {"input_ids": TEXTS[:, :-1], "labels": labels, "attention_mask": TEXT}
    found = as_inputs(batch, graph(PLAIN), SEQ)
    assert found.keys() == {"tokens", "labels", "mask"}
    assert torch.equal(found["labels"][:, :-1], labels[:, 1:].clamp(min=0))
    assert torch.equal(found["mask"].sum(1), torch.full((4,), 8))
    assert torch.equal(as_inputs(batch, graph(PACKED), SEQ)["documents"], 1 - TEXT)
    types = {"token_type_ids": torch.zeros_like(TEXT)}
    whole = {**batch, "attention_mask": torch.ones_like(TEXT)}
    bert = as_inputs({**whole, **types}, graph(tiny_bert()), SEQ)  # labels of masked tokens are where they are
    assert torch.equal(bert["labels"], labels.clamp(min=0))
    assert torch.equal(bert["mask"], labels >= 0)
    assert "types" in bert
    assert "has types other than 0" in refusal(lambda: as_inputs({**whole, "token_type_ids": TEXT}, graph(PLAIN), SEQ))
    assert "the last position has none, and the loss of tiny-gpt has no" in refusal(
        lambda: as_inputs(whole, graph(tiny_gpt()), SEQ)
    )
    assert "tiny-pair has no input of running text" in refusal(lambda: as_inputs(whole, graph(tiny_pair()), SEQ))
