"""Parameters of the published models, and their published config.json files read as these models.

configs/ says what the config.json's on the Hugging Face hub say, under the names of the models here: those of
openai-community/gpt2*, meta-llama/*, mistralai/*, Qwen/*, google/gemma*, deepseek-ai/*, openai/gpt-oss*, nvidia/*,
google-bert/*-uncased, google-t5/*, google/t5-v1_1*, facebook/bart*, google/vit-base-patch16-224, llava-hf/llava-1.5*,
state-spaces/mamba2* (in the form of transformers), bigcode/starcoder, bigscience/bloom* and zai-org/GLM-4.5*.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here needs the network

import torch

from megaloom.dsl import Attend, Drop, Model, MoE, fingerprint, graph, params, read
from megaloom.dsl.catalog import examples
from megaloom.dsl.hf.fields import DROPOUT
from megaloom.dsl.node import primitives
from megaloom.examples.glm4_moe import glm4_5, glm4_5_air
from tests.support.models.examples import example

transformers = pytest.importorskip("transformers", reason="`make unit` installs it")

CONFIGS = {path.stem: path for path in sorted((ROOT / "tests/configs").glob("*.json"))}
GOLDEN = ROOT / "tests/golden/parameters.txt"

# Elements of the weights on the hub that Hugging Face's code, made by the config.json, does not say by itself.
PUBLISHED = {
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "t5-v1-1-base": 247_577_856,
}
OURS = {"stdlib-gpt", "own-layer", "own-module"}  # published nowhere else


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_the_model_that_they_make_of_it(name: str) -> None:
    """As many parameters, and the same again as they write it: each default said, positions as of transformers 5."""
    fields = json.loads(CONFIGS[name].read_text())
    theirs_class = getattr(transformers, fields["architectures"][0])
    with torch.device("meta"):
        theirs = theirs_class._from_config(theirs_class.config_class.from_dict(fields))
    ours = read(CONFIGS[name])
    assert params(ours) == counted_by(theirs)
    again = read({**theirs.config.to_dict(), "architectures": fields["architectures"]})
    if name == "t5-v1-1-base":  # transformers 5 writes it as tied; the tensors beside a config.json tell
        assert params(again) == params(ours) - fields["vocab_size"] * fields["d_model"]
    else:
        assert fingerprint(again) == fingerprint(ours)


def counted_by(theirs: Any) -> int:
    """Their parameters, less those that no output depends on, and both tables of T5 1.1, of which they make one."""
    unused = re.compile(r"vision_tower.*(encoder\.layers\.23\.|post_layernorm\.)")
    two = getattr(theirs.config, "scale_decoder_outputs", True) is False
    extra = theirs.shared.weight.numel() if two else 0
    return theirs.num_parameters() + extra - sum(p.numel() for n, p in theirs.named_parameters() if unused.search(n))


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() & examples().keys()))
def test_a_config_is_the_model_of_that_name(name: str) -> None:
    """The examples have no dropout, no least step, and the balancing loss with which the authors trained."""
    fields = json.loads(CONFIGS[name].read_text())
    fields |= dict.fromkeys(fields.keys() & {*DROPOUT.split(), "time_step_min"}, 0.0)
    balance = next((n.op.balance for n in graph(example(name)).nodes if isinstance(n.op, MoE)), None)
    assert fingerprint(read(fields, balance=balance)) == fingerprint(example(name))


def test_no_published_config_loses_dropout_or_initial_values() -> None:
    """Models have the dropout of their config. The only field without use is T5's factor of initial values."""
    models = {name: read(path) for name, path in CONFIGS.items()}
    fields = {name: json.loads(path.read_text()) for name, path in CONFIGS.items()}
    with_rates = {name for name, f in fields.items() if any(f.get(rate) for rate in DROPOUT.split())}
    assert {name for name, m in models.items() if dropout_rates(m)} == with_rates
    assert len(with_rates) == 11
    t5 = {name for name in models if name.startswith("t5")}
    assert {name: m.unused for name, m in models.items() if m.unused} == dict.fromkeys(
        t5, ("initializer_factor = 1.0",)
    )
    assert {m.std for m in models.values()} == {0.02, 0.01, 0.1}


def dropout_rates(m: Model) -> list[float]:
    """The rates of all dropouts of a model, in order."""
    ops = (v.op for n in graph(m).nodes for v, *_ in primitives(n.value))
    rates = (op.rate if isinstance(op, Drop) else op.dropout for op in ops if isinstance(op, Drop | Attend))
    return [rate for rate in rates if rate]


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_published(name: str) -> None:
    assert params(example(name)) == PUBLISHED[name]


# The table of all of them


@cache
def counted() -> dict[str, int]:
    """The parameters of each published model of the examples."""
    return {name: params(example(name)) for name in examples() if name not in OURS}


def rows() -> Iterator[str]:
    """Each model with its parameters, and whether Hugging Face's code counts as many."""
    counts = {name: params(read(path)) for name, path in CONFIGS.items() if name not in counted()} | counted()
    for name in sorted(counts):
        yield f"{name:<22}{counts[name]:>20,}{'  as Hugging Face' if name in CONFIGS else ''}"


def agrees(path: Path, text: str, update: bool) -> bool:
    """Return True if a file has this text; with --update, write the text into it."""
    if update:
        path.write_text(text)
    return path.read_text() == text


def test_the_table_of_parameters(request: pytest.FixtureRequest) -> None:
    assert agrees(GOLDEN, "\n".join(rows()) + "\n", request.config.getoption("--update"))


@pytest.mark.parametrize(
    ("name", "mtp_layers", "billions"),
    [
        ("glm4-5", 1, 355),  # arXiv:2508.06471, table 1: with multi-token prediction, without the embedding and logits
        ("glm4-5-air", 0, 106),  # there too; with multi-token prediction it has 108
    ],
)
def test_glm_has_as_many_parameters_as_published(name: str, mtp_layers: int, billions: int) -> None:
    build = {"glm4-5": glm4_5, "glm4-5-air": glm4_5_air}[name]
    m = build(mtp_layers)
    tables = 2 * 151_552 * (5120 if name == "glm4-5" else 4096)
    assert round((params(m) - tables) / 1e9) == billions
