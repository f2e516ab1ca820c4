"""Models with document indices in which a layer reads across documents are refused."""

from typing import Any

import pytest

from megaloom.dsl import Attention, Dim, Embed, Model, NextToken, Unembed, documents, graph, ids, model, packed, weight
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
        (lambda: packed(mamba2_130m()), "has a convolution along the sequence"),
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
    with pytest.raises(UserError, match="t5-small one input of document indices: it reads two sequences"):
        packed(t5_small())
