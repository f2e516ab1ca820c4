"""Models with document indices in which a layer reads across documents are refused."""

from typing import Any

import pytest

from megaloom.dsl import (
    Attention,
    Classification,
    CrossAttention,
    Dim,
    Embed,
    Model,
    NextToken,
    Select,
    Unembed,
    apply,
    documents,
    graph,
    ids,
    model,
    packed,
    weight,
)
from megaloom.dsl.errors import UserError
from megaloom.examples.mamba2 import mamba2_130m
from megaloom.examples.t5 import t5_small
from megaloom.planner.rules.packing import document_mixing
from tests.support.models.small import tiny_gpt, tiny_vit


def half_packed() -> Model:
    """Only the first attention reads the indices."""
    table, attention = weight("wte", Dim("vocab", 11), Dim("embed", 8)), Attention(heads=2)
    x = ids() >> Embed(table) >> attention.given(documents=documents()) >> attention
    return model("half-packed", x >> Unembed(table) >> NextToken())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (half_packed, "attention.1 does not read the document indices"),
        (lambda: packed(mamba2_130m()), "applies Conv along the sequence"),
    ],
)
def test_layers_that_read_across_documents_are_refused(make: Any, message: str) -> None:
    assert message in (document_mixing(graph(make())) or ("",))[0]


def test_attention_in_documents_is_not_refused() -> None:
    assert document_mixing(graph(packed(tiny_gpt()))) is None
    assert document_mixing(graph(tiny_vit())) is None


def test_a_packed_model_has_the_weights_of_the_model() -> None:
    one, both = graph(tiny_gpt()), graph(packed(tiny_gpt()))
    assert {k: s.dims for k, s in one.weights.items()} == {k: s.dims for k, s in both.weights.items()}
    assert packed(m := packed(tiny_gpt())) is m


def test_a_model_without_tokens_cannot_be_packed() -> None:
    with pytest.raises(UserError, match=r"tiny-vit reads no tokens, so it cannot read documents\nomit packed\(model\)"):
        packed(tiny_vit())


def test_a_packed_decoder_reads_the_indices_of_its_source() -> None:
    """The encoder reads its own, the cross-attention both."""
    one, both, each = graph(t5_small()), graph(packed(t5_small())), ("documents", "source_documents")
    assert {k: s.dims for k, s in one.weights.items()} == {k: s.dims for k, s in both.weights.items()}
    assert [n.name for n in one.nodes] == [n.name for n in both.nodes if n.name not in each]
    read = {frozenset(n.inputs) & frozenset(each) for n in both.nodes}
    assert read == {frozenset(), frozenset({"source_documents"}), frozenset({"documents"}), frozenset(each)}
    crossing = [n for n in both.nodes if {*each} <= {*n.inputs}]
    assert {type(n.op) for n in crossing} == {CrossAttention}
    assert document_mixing(both) is None


def test_the_first_position_is_that_of_one_document() -> None:
    """A class is read from [CLS], which reads no padding; any other position may be of another document."""
    d = Dim("embed", 8)
    x = ids() >> Embed(weight("wte", Dim("vocab", 11), d)) >> Attention(heads=2, causal=False)

    def classifier(position: int) -> Model:
        logits = apply(Select("seq", position), x) >> Unembed(weight("head", Dim("vocab", 3), d))
        return packed(model("classifier", logits >> Classification()))

    assert document_mixing(graph(classifier(0))) is None
    assert "applies Select along the sequence" in (document_mixing(graph(classifier(1))) or ("",))[0]
