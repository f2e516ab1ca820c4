"""Dropout and initial values of a config.json: the model has those that Hugging Face's code has."""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

import pytest

from tests.support.paths import TESTS

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here needs the network

import torch
from torch import Tensor

from megaloom.dsl import (
    MLP,
    Attend,
    Dim,
    Drop,
    Embed,
    Layer,
    Model,
    ShapeError,
    Unembed,
    UserError,
    fingerprint,
    graph,
    ids,
    model,
    read,
    weight,
)
from megaloom.dsl.node import primitives
from megaloom.dsl.show.outline import outline
from megaloom.dsl.show.table import footer
from megaloom.runtime.modules.initial_weights import initial_weight

transformers = pytest.importorskip("transformers", reason="`make unit` installs it")

# One rate for each field, so that none can be taken for another.
FIELDS = {
    "bart": ("dropout", "attention_dropout", "activation_dropout"),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "bloom": ("hidden_dropout", "attention_dropout"),
    "gemma2": ("attention_dropout",),
    "gemma3": ("attention_dropout",),
    "gpt-oss": ("attention_dropout",),
    "gpt2": ("resid_pdrop", "attn_pdrop", "embd_pdrop"),
    "llama": ("attention_dropout",),
    "mistral": ("attention_dropout",),
    "mixtral": ("attention_dropout",),
    "nemotron": ("attention_dropout",),
    "nemotron-h": ("attention_dropout",),
    "qwen2": ("attention_dropout",),
    "qwen3": ("attention_dropout",),
    "qwen3-moe": ("attention_dropout",),
    "starcoder": ("resid_pdrop", "attn_pdrop", "embd_pdrop"),
    "t5": ("dropout_rate",),
    "t5-v1.1": ("dropout_rate",),
    "vit": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
}
RATES = (0.11, 0.13, 0.17)


def small(name: str, **fields: Any) -> dict[str, Any]:
    return json.loads((TESTS / "configs" / "small" / f"{name}.json").read_text()) | fields


@pytest.mark.parametrize("name", FIELDS)
def test_dropout_is_where_theirs_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As often, at the same rates: of hidden states, and of attention probabilities."""
    fields = small(name, **dict(zip(FIELDS[name], RATES, strict=False)))
    assert dropouts(read(fields)) == theirs(fields, monkeypatch)


def dropouts(m: Model) -> Counter[tuple[bool, float]]:
    """The dropouts of a model, each as (of attention probabilities, rate)."""
    ops = [v.op for n in graph(m).nodes for v, *_ in primitives(n.value)]
    hidden = Counter((False, op.rate) for op in ops if isinstance(op, Drop) and op.rate)
    return hidden + Counter((True, op.dropout) for op in ops if isinstance(op, Attend) and op.dropout)


def theirs(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[bool, float]]:
    """The dropouts that Hugging Face's model calls in a forward pass."""
    kind = getattr(transformers, fields["architectures"][0])
    with_dropout = kind._from_config(kind.config_class.from_dict(fields), attn_implementation="eager").train()
    calls: Counter[tuple[bool, float]] = Counter()

    def count(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if p and training:
            calls[x.ndim == 4, p] += 1
        return x

    monkeypatch.setattr(torch.nn.functional, "dropout", count)
    tokens = torch.randint(60, (2, 9))
    image = "ViT" in fields["architectures"][0]
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16)} if image else {"input_ids": tokens}
    if getattr(with_dropout.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = tokens
    with torch.no_grad():
        with_dropout(**inputs)
    return calls


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3"])
def test_dropout_that_a_layer_does_not_have_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"attention_dropout = 0.1 is not supported\nsupported: 0.0"):
        read(small(name, attention_dropout=0.1))


def test_what_is_not_used_is_listed() -> None:
    m = read(small("mixtral", router_jitter_noise=0.01, hidden_dropout=0.2, resid_pdrop=0.0))
    assert m.unused == ("router_jitter_noise = 0.01", "hidden_dropout = 0.2")
    shown = footer(outline(m, batch=1, seq=16), "bf16").splitlines()
    assert shown[-1] == "fields of the config.json without effect: router_jitter_noise = 0.01, hidden_dropout = 0.2"
    assert len(footer(outline(read(small("mixtral")), batch=1, seq=16), "bf16").splitlines()) == len(shown) - 1


@pytest.mark.parametrize("rate", [1.0, -0.1, "0.1"])
def test_a_rate_is_a_probability(rate: object) -> None:
    with pytest.raises(UserError, match="attention_dropout must be a number of at least 0 and below 1, got"):
        read(small("llama", attention_dropout=rate))
    if not isinstance(rate, str):
        with pytest.raises(ShapeError, match="dropout must be at least 0 and below 1, got"):
            MLP(8, dropout=rate)  # type: ignore[arg-type]


# Initial values


@pytest.mark.parametrize(
    ("name", "fields", "std"),
    [
        ("llama", {}, 0.02),
        ("llama", {"initializer_range": 0.006}, 0.006),
        ("nemotron", {}, 0.0134),
        ("mamba2", {}, 0.1),
        ("bart", {"init_std": 0.05}, 0.05),
    ],
)
def test_initial_weights_have_the_std_of_the_config(name: str, fields: dict[str, Any], std: float) -> None:
    m = read(small(name, **fields))
    assert m.std == std
    slots = graph(m).weights
    drawn = initial_weight(slots["wte"], seed=1).read()
    assert drawn.std().item() == pytest.approx(std, rel=0.1)
    assert {s.std for s in slots.values()} == {std, 0.0}  # biases and norms are constant
    if not fields:
        kind = getattr(transformers, small(name)["architectures"][0])
        assert std == kind.config_class().initializer_range


def lm(**std: float) -> Model:
    table = weight("wte", Dim("vocab", 61), Dim("embed", 8))
    layer: Layer = MLP(16)
    return model("m", ids() >> Embed(table) >> layer >> Unembed(table), **std)


def test_the_std_of_a_model_is_part_of_its_identity() -> None:
    assert fingerprint(lm()) == fingerprint(lm(std=0.02)) != fingerprint(lm(std=0.01))
    with pytest.raises(ShapeError, match="cannot have weights of standard deviation -1"):
        lm(std=-1)
