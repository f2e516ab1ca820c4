"""Small Hugging Face models with random weights, against the models that are read from their files.

configs/small/ holds a config.json of each architecture that is read, and of variants of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from safetensors.torch import load_file
from torch import Tensor

from megaloom.dsl import (
    Attend,
    Clamp,
    Gate,
    Model,
    Normalize,
    Op,
    PositionLookup,
    Rope,
    UserError,
    Value,
    graph,
    params,
    without_loss,
)
from megaloom.dsl.example_modules import example_modules
from megaloom.dsl.hf.architectures import Reader, open_config, reader
from megaloom.dsl.hf.architectures import read as megaloom_read
from megaloom.dsl.hf.fields import Config
from megaloom.dsl.hf.state_dict import from_checkpoint, to_checkpoint
from megaloom.runtime.reference import interpret as oracle
from megaloom.runtime.reference.interpret import interpret, whole
from tests.support.models.hugging_face import ORDERS, SMALL, UNUSED, built, drawn, named


@frozen
class Saved:
    """Logits and files of a Hugging Face model, and the model that is read from these files."""

    logits: tuple[Tensor, ...]  # of each head
    inputs: Mapping[str, Tensor]
    parameters: int
    fields: Mapping[str, Any]
    checkpoint: Mapping[str, Tensor]
    read: Reader
    model: Model

    def weights(self) -> dict[str, Tensor]:
        return from_checkpoint(self.read.names, self.model, self.checkpoint, torch.cat)


@cache
def saved(name: str) -> Saved:
    """A model whose weights are so random that none can be left out, or taken for another, unnoticed."""
    torch.manual_seed(0)
    theirs = built(name)
    with TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        config, called = open_config(folder)
        read = reader(config)
        checkpoint = load_file(Path(folder) / "model.safetensors")
        model = read(config, called)
    inputs = drawn(model)
    with torch.no_grad():
        out = theirs(**named(inputs))
        logits = (out.prediction_logits, out.seq_relationship_logits) if name in ORDERS else (out.logits,)
    return Saved(logits, inputs, theirs.num_parameters(), config.fields, checkpoint, read, model)


# Bart without its logits, and what T5 was called before.
SAME = {"BartModel", "T5WithLMHeadModel"}


def test_each_architecture_that_is_read_is_tested() -> None:
    readers = [it for m in example_modules() for it in vars(m).values() if isinstance(it, Reader)]
    tested = {json.loads(path.read_text())["architectures"][0] for path in SMALL.values()}
    assert {a for r in readers for a in r.architectures} - tested == SAME


@pytest.mark.parametrize("name", SMALL)
def test_logits_are_theirs(name: str) -> None:
    it = saved(name)
    found = interpret(without_loss(it.model), it.weights(), it.inputs)
    assert 0.3 < it.logits[0].std() < 30
    for logits, theirs in zip(found, it.logits, strict=True):
        torch.testing.assert_close(logits, theirs, rtol=0, atol=1e-5 * max(1.0, theirs.std().item()))


@pytest.mark.parametrize("name", SMALL)
def test_parameters_are_theirs(name: str) -> None:
    it = saved(name)
    unused = sum(x.numel() for n, x in it.checkpoint.items() if n.startswith(UNUSED[:2]))  # the last is a buffer
    assert params(it.model) == it.parameters - unused


@pytest.mark.parametrize("name", SMALL)
def test_what_is_given_back_is_what_was_taken(name: str) -> None:
    it = saved(name)
    weights = it.weights()
    assert weights.keys() == graph(it.model).weights.keys()
    back = to_checkpoint(it.read.names, it.model, weights, torch.cat)
    assert all(torch.equal(it.checkpoint[n], x) for n, x in back.items())
    assert all(n.startswith(UNUSED) for n in it.checkpoint.keys() - back.keys())


def test_logits_of_t5_are_tied_unless_the_weights_have_a_table_of_their_own(tmp_path: Path) -> None:
    """Transformers 5 writes one config.json for both. A config alone, or a model in memory, says it too."""
    for name, tied in (("t5-v1.1", False), ("t5-v1.1-tied", True)):
        theirs = built(name)
        theirs.save_pretrained(tmp_path / name, max_shard_size="20KB" if tied else "1GB")
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert (config["tie_word_embeddings"], config["scale_decoder_outputs"]) == (True, False)
        for source, is_tied in ((tmp_path / name, tied), (theirs, tied), (config, True)):
            assert ("head" not in graph(megaloom_read(source)).weights) == is_tied
    (tmp_path / "t5-v1.1" / "model.safetensors").write_bytes(b"damaged, and longer than a header")
    with pytest.raises(UserError, match=r"cannot read the names of the tensors in .*model.safetensors"):
        megaloom_read(tmp_path / "t5-v1.1")


OTHER: list[tuple[str, str, Any]] = [
    ("llama", "rms_norm_eps", 0.01),
    ("llama", "rope_parameters", {"rope_theta": 99.0}),
    ("mixtral", "num_experts_per_tok", 3),
    ("mistral", "sliding_window", None),
    ("qwen3-moe", "norm_topk_prob", True),
    ("qwen3-moe", "num_experts_per_tok", 2),
    ("qwen3-moe-dense", "num_experts_per_tok", 2),
    ("gemma2", "query_pre_attn_scalar", 16),
    ("gemma2", "sliding_window", 6),
    ("gemma3", "query_pre_attn_scalar", 16),
    ("gemma3", "sliding_window", 6),
    ("nemotron", "rope_parameters", {"partial_rotary_factor": 1.0}),
    ("deepseek-v2", "routed_scaling_factor", 2.0),
    ("deepseek-v2", "topk_group", 3),
    ("deepseek-v2", "topk_method", "greedy"),
    ("deepseek-v3", "routed_scaling_factor", 1.0),
    ("deepseek-v3", "topk_group", 3),
    ("deepseek-v3", "norm_topk_prob", False),
    ("gpt-oss", "sliding_window", 4),
    ("gpt-oss", "swiglu_limit", 7.0),
    ("t5", "relative_attention_max_distance", 40),
]


@pytest.mark.parametrize(("name", "field", "value"), OTHER)
def test_another_value_is_another_model(name: str, field: str, value: object) -> None:
    it = saved(name)
    other = it.read(Config(dict(it.fields) | {field: value}, "config"), "other")
    (logits,) = interpret(without_loss(other), it.weights(), it.inputs)
    assert (logits - it.logits[0]).abs().max() > 1e-3


# Options of primitives, and a value as if there were no such option.
LEFT_OUT: list[tuple[str, type[Op], dict[str, Any]]] = [
    ("llama-3.1", Rope, {"scaling": None}),
    ("llama-linear", Rope, {"scaling": None}),
    ("llama-yarn", Rope, {"scaling": None}),
    ("mixtral", Gate, {"normalize": False}),
    ("mistral", Attend, {"window": None}),
    ("gemma2", Attend, {"window": None}),
    ("gemma2", Attend, {"softcap": None}),
    ("gemma2", Attend, {"scale": None}),
    ("gemma3", Rope, {"scaling": None}),
    ("nemotron", Rope, {"channels": None}),
    ("deepseek-v2", Rope, {"interleaved": False}),
    ("deepseek-v2", Gate, {"groups": 1, "top_groups": 1}),
    ("deepseek-v2", Gate, {"best": 2}),
    ("deepseek-v3", Gate, {"score": "softmax"}),
    ("deepseek-v3", Gate, {"best": 1}),
    ("deepseek-v3", Attend, {"scale": None}),
    ("gpt-oss", Clamp, {"high": 100.0}),
    ("gpt-oss", Clamp, {"low": -100.0}),
    ("bert", Attend, {"causal": True}),
    ("t5", Attend, {"scale": None}),
    ("bart", PositionLookup, {"offset": 0}),
    ("bloom", Attend, {"alibi": False}),
    ("mamba2", Normalize, {"groups": 1}),
    ("starcoder", Normalize, {"eps": 0.01}),
]


@pytest.mark.parametrize(("name", "kind", "changes"), LEFT_OUT)
def test_an_option_left_out_would_show(
    name: str, kind: type[Op], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(op: Op, out: Value, *args: Tensor) -> Tensor:
        return whole(evolve(op, **changes) if isinstance(op, kind) else op, out, *args)

    monkeypatch.setattr(oracle, "whole", without)
    it = saved(name)
    (logits,) = interpret(without_loss(it.model), it.weights(), it.inputs)
    assert (logits - it.logits[0]).abs().max() > 1e-4
