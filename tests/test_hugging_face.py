"""Models of Hugging Face, small and with random weights, against what is read of the files that they save."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from attrs import frozen

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here needs the network

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from megaloom.dsl import Model, graph, params
from megaloom.dsl.config import Config
from megaloom.dsl.hub import Reader, opened, reader
from megaloom.dsl.state import give, take
from megaloom.runtime.interpret import interpret

transformers.logging.set_verbosity_error()

VOCAB, SEQ = 61, 23
NO_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    **NO_IDS,
}


@frozen
class Case:
    """An architecture, the fields of a small config, and the fields of which another value makes another model."""

    architecture: str
    fields: Mapping[str, Any]
    other: Mapping[str, Any] = {}


GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "n_positions": 32, **NO_IDS}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 8}

CASES = {
    "gpt2": Case("GPT2LMHeadModel", GPT2),
    "llama": Case(
        "LlamaForCausalLM",
        SMALL,
        {"rms_norm_eps": 1e-2, "rope_parameters": {"rope_theta": 99.0}, "tie_word_embeddings": True},
    ),
    "llama tied": Case("LlamaForCausalLM", SMALL | {"tie_word_embeddings": True, "head_dim": 16}),
    "llama 3.1": Case(
        "LlamaForCausalLM", SMALL | {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 8}}
    ),
    "llama linear": Case("LlamaForCausalLM", SMALL | {"rope_parameters": LINEAR}),
    "llama yarn": Case("LlamaForCausalLM", SMALL | {"rope_parameters": YARN}),
    "mixtral": Case("MixtralForCausalLM", SMALL | {"num_local_experts": 5}, {"num_experts_per_tok": 3}),
    "mistral": Case(
        "MistralForCausalLM", SMALL | {"sliding_window": 5, "rms_norm_eps": 1e-5}, {"sliding_window": None}
    ),
    "qwen2": Case("Qwen2ForCausalLM", SMALL | {"tie_word_embeddings": True}),
    "qwen3": Case("Qwen3ForCausalLM", SMALL | {"head_dim": 16}),
    "qwen3 moe": Case(
        "Qwen3MoeForCausalLM",
        SMALL | {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
        {"norm_topk_prob": True, "num_experts_per_tok": 2},
    ),
    "gemma2": Case(
        "Gemma2ForCausalLM",
        SMALL | {"num_hidden_layers": 4, "head_dim": 16, "query_pre_attn_scalar": 9, "sliding_window": 5},
        {"query_pre_attn_scalar": 16, "sliding_window": 6},
    ),
    "gemma3": Case(
        "Gemma3ForCausalLM",
        SMALL
        | {"num_hidden_layers": 8, "head_dim": 16, "query_pre_attn_scalar": 9, "sliding_window": 5}
        | {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_theta": 50.0}}},
        {"query_pre_attn_scalar": 16, "sliding_window": 6},
    ),
    "nemotron": Case("NemotronForCausalLM", SMALL, {"rope_parameters": {"partial_rotary_factor": 1.0}}),
    "nemotron wide": Case("NemotronForCausalLM", SMALL | {"head_dim": 12, "num_key_value_heads": 1}),
}


@frozen
class Saved:
    """What Hugging Face computes, what it saves of the model, and what is read of that."""

    logits: Tensor
    inputs: Mapping[str, Tensor]
    parameters: int
    fields: Mapping[str, Any]
    checkpoint: Mapping[str, Tensor]
    read: Reader
    model: Model

    def weights(self) -> dict[str, Tensor]:
        return take(self.read.names, self.model, self.checkpoint)


@cache
def saved(name: str) -> Saved:
    """A model whose weights are so random that none can be left out, or taken for another, unnoticed."""
    case = CASES[name]
    torch.manual_seed(0)
    theirs_class = getattr(transformers, case.architecture)
    theirs = theirs_class._from_config(theirs_class.config_class(**case.fields), attn_implementation="eager").eval()
    tokens = torch.randint(VOCAB, (2, SEQ))
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn_like(p) * 0.2)
        logits = theirs(tokens).logits
    with TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        config, called = opened(folder)
        read = reader(config)
        checkpoint = load_file(Path(folder) / "model.safetensors")
    return Saved(
        logits, {"tokens": tokens}, theirs.num_parameters(), config.fields, checkpoint, read, read(config, called)
    )


@pytest.mark.parametrize("name", CASES)
def test_logits_are_theirs(name: str) -> None:
    it = saved(name)
    (logits,) = interpret(it.model, it.weights(), it.inputs)
    assert 0.3 < it.logits.std() < 30
    torch.testing.assert_close(logits, it.logits, rtol=0, atol=1e-5 * max(1.0, it.logits.std().item()))


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_theirs(name: str) -> None:
    assert params(saved(name).model) == saved(name).parameters


@pytest.mark.parametrize("name", CASES)
def test_what_is_given_back_is_what_was_taken(name: str) -> None:
    it = saved(name)
    weights = it.weights()
    assert weights.keys() == graph(it.model).weights.keys()
    back = give(it.read.names, it.model, weights)
    assert back.keys() == it.checkpoint.keys()
    assert all(torch.equal(back[k], x) for k, x in it.checkpoint.items())


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, case in CASES.items() for field in case.other])
def test_another_value_is_another_model(name: str, field: str) -> None:
    it = saved(name)
    other = it.read(Config(dict(it.fields) | {field: CASES[name].other[field]}, "config"), "other")
    have = it.weights()
    if missing := graph(other).weights.keys() ^ have.keys():
        assert field in ("tie_word_embeddings",), missing
        return
    (logits,) = interpret(other, have, it.inputs)
    assert (logits - it.logits).abs().max() > 1e-3
