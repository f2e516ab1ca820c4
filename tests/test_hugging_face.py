"""Models of Hugging Face, small and with random weights, against what is read of the files that they save."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
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


def tokens(high: int = VOCAB, seq: int = SEQ) -> Tensor:
    return torch.randint(high, (2, seq))


def text() -> dict[str, Tensor]:
    return {"tokens": tokens()}


def typed() -> dict[str, Tensor]:
    return {"tokens": tokens(), "types": tokens(2)}


def translated() -> dict[str, Tensor]:
    return {"tokens": tokens(seq=17), "source_tokens": tokens()}


def seen() -> dict[str, Tensor]:
    return {"image": torch.randn(2, 3, 16, 16)}


def shown() -> dict[str, Tensor]:
    """Tokens of which 16 stand for the patches of an image of their own."""
    at = torch.stack([torch.randperm(SEQ)[:16] for _ in range(2)])
    return {**seen(), "tokens": tokens(VOCAB - 1).scatter(1, at, VOCAB - 1)}


THEIRS = {"tokens": "input_ids", "types": "token_type_ids", "source_tokens": "input_ids", "image": "pixel_values"}


@frozen
class Case:
    """An architecture, the fields of a small config, those of which another value makes another model, and inputs."""

    architecture: str
    fields: Mapping[str, Any]
    other: Mapping[str, Any] = {}
    inputs: Callable[[], dict[str, Tensor]] = text
    noise: float = 0.2


GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "n_positions": 32, **NO_IDS}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 8}
DEEPSEEK = SMALL | {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
}
BERT = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"} | {"max_position_embeddings": 32}
VIT = {k: v for k, v in BERT.items() if k not in ("vocab_size", "max_position_embeddings")}
T5 = NO_IDS | {"vocab_size": VOCAB, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
BART = NO_IDS | {"vocab_size": VOCAB, "d_model": 32, "max_position_embeddings": 32, "forced_eos_token_id": None}
BART |= {f"{side}_{n}": v for side in ("encoder", "decoder") for n, v in (("layers", 2), ("attention_heads", 4))}
BART |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": None}
EYE = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4}
EYE |= {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 4}
LLAVA = {
    "vision_config": EYE,
    "text_config": SMALL | {"model_type": "llama", "num_key_value_heads": 4, "rms_norm_eps": 1e-5},
    "image_token_index": VOCAB - 1,
}
BLOOM = NO_IDS | {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}
MAMBA2 = NO_IDS | {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8}
MAMBA2 |= {"state_size": 12, "n_groups": 2, "chunk_size": 8}
NEMOTRON_H = {k: v for k, v in SMALL.items() if k != "num_hidden_layers"} | {
    "hybrid_override_pattern": "M-M*-",
    "head_dim": 10,
    "mamba_num_heads": 8,
    "mamba_head_dim": 4,
    "time_step_min": 1e-6,  # which their code takes for the least of all steps, and the model was not trained with
    "ssm_state_size": 12,
    "n_groups": 2,
    "chunk_size": 8,
}

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
    "deepseek v2": Case(
        "DeepseekV2ForCausalLM",
        DEEPSEEK | {"topk_method": "group_limited_greedy", "q_lora_rank": 20, "routed_scaling_factor": 3.0},
        {"routed_scaling_factor": 2.0, "topk_group": 3, "topk_method": "greedy"},
    ),
    "deepseek v2 lite": Case("DeepseekV2ForCausalLM", DEEPSEEK | {"topk_method": "greedy", "q_lora_rank": None}),
    "deepseek v3": Case(
        "DeepseekV3ForCausalLM",
        DEEPSEEK | {"q_lora_rank": 20},
        {"routed_scaling_factor": 1.0, "topk_group": 3, "norm_topk_prob": False},
    ),
    "gpt oss": Case(
        "GptOssForCausalLM",
        SMALL | {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 5},
        {"sliding_window": 4},
    ),
    "bert": Case("BertForMaskedLM", BERT, inputs=typed),
    "t5": Case("T5ForConditionalGeneration", T5, {"relative_attention_max_distance": 40}, inputs=translated, noise=0.1),
    "t5 v1.1": Case(
        "T5ForConditionalGeneration",
        T5 | {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 3, "tie_word_embeddings": False},
        inputs=translated,
        noise=0.1,
    ),
    "bart": Case("BartForConditionalGeneration", BART, inputs=translated),
    "vit": Case("ViTForImageClassification", VIT | {"image_size": 16, "patch_size": 4}, inputs=seen),
    "llava": Case("LlavaForConditionalGeneration", LLAVA, inputs=shown),
    "starcoder": Case("GPTBigCodeForCausalLM", GPT2),
    "bloom": Case("BloomForCausalLM", BLOOM),
    "bloom of 6 heads": Case("BloomForCausalLM", BLOOM | {"n_head": 6, "hidden_size": 48}),
    "mamba2": Case("Mamba2ForCausalLM", MAMBA2, {"tie_word_embeddings": True}),
    "mamba2 tied": Case("Mamba2ForCausalLM", MAMBA2 | {"tie_word_embeddings": True, "n_groups": 1}),
    "nemotron h": Case("NemotronHForCausalLM", NEMOTRON_H),
}

# What no output depends on: the layers of an image encoder after the one that is read, a bias that is always zero.
UNUSED = ("vision_tower.encoder.layers.2.", "vision_tower.post_layernorm.", "final_logits_bias")


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
    if case.fields.get("tie_word_embeddings") is False:  # T5 makes two tables one, and tells by loading what was two
        theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight.detach().clone())
    inputs = case.inputs()
    named = {THEIRS[name]: x for name, x in inputs.items()}
    if "source_tokens" in inputs:
        named["decoder_input_ids"] = inputs["tokens"]
    stored = theirs.state_dict()
    with torch.no_grad():
        for p in {id(p): p for name, p in stored.items() if name != "final_logits_bias"}.values():
            p.add_(torch.randn_like(p) * case.noise)
        logits = theirs(**named).logits
    with TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        config, called = opened(folder)
        read = reader(config)
        checkpoint = load_file(Path(folder) / "model.safetensors")
    return Saved(logits, inputs, theirs.num_parameters(), config.fields, checkpoint, read, read(config, called))


@pytest.mark.parametrize("name", CASES)
def test_logits_are_theirs(name: str) -> None:
    it = saved(name)
    (logits,) = interpret(it.model, it.weights(), it.inputs)
    assert 0.3 < it.logits.std() < 30
    torch.testing.assert_close(logits, it.logits, rtol=0, atol=1e-5 * max(1.0, it.logits.std().item()))


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_theirs(name: str) -> None:
    it = saved(name)
    unused = sum(x.numel() for n, x in it.checkpoint.items() if n.startswith(UNUSED[:2]))  # the last is a buffer
    assert params(it.model) == it.parameters - unused


@pytest.mark.parametrize("name", CASES)
def test_what_is_given_back_is_what_was_taken(name: str) -> None:
    it = saved(name)
    weights = it.weights()
    assert weights.keys() == graph(it.model).weights.keys()
    back = give(it.read.names, it.model, weights)
    assert all(torch.equal(it.checkpoint[n], x) for n, x in back.items())
    assert all(n.startswith(UNUSED) for n in it.checkpoint.keys() - back.keys())


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
