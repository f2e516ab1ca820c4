"""Fields that a config.json may have, and messages for files that cannot be read."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megaloom.dsl import (
    Dim,
    Embed,
    LinearScaling,
    Llama3Scaling,
    Model,
    RMSNorm,
    Rope,
    SwiGLU,
    Unembed,
    UserError,
    YarnScaling,
    fingerprint,
    graph,
    ids,
    model,
    params,
    read,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.catalog import file_name, find
from megaloom.dsl.hf.fields import UNUSED, Config, rope, rotation
from megaloom.dsl.hf.state_dict import from_checkpoint, to_checkpoint
from megaloom.dsl.hf.tensor_check import check_values
from megaloom.dsl.hf.tensor_names import (
    JOIN,
    Names,
    Stored,
    columns,
    flat,
    rows,
)
from tests.support.paths import TESTS

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 61,
}


def refused(fields: dict[str, Any] | str | Path) -> str:
    with pytest.raises(UserError) as error:
        read(fields)
    return str(error.value)


# Reading


def test_a_file_a_folder_and_its_fields_are_one_model(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "other.json").write_text(json.dumps(LLAMA))
    results = [read(LLAMA), read(folder), read(str(folder / "config.json")), read(tmp_path / "other.json")]
    assert [m.name for m in results] == ["llama", "tiny-llama", "tiny-llama", "other"]
    assert len({fingerprint(m) for m in results}) == 1


def test_what_is_found_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.chdir(tmp_path)
    for ref in ("tiny", "tiny/", "tiny/config.json", str(tmp_path / "tiny")):
        m, canonical = find(ref)
        assert (m.name, canonical) == ("tiny", str(tmp_path / "tiny" / "config.json"))
    monkeypatch.chdir("/")
    assert fingerprint(find(canonical)[0]) == fingerprint(m)
    assert file_name(canonical) == "tiny"


def test_an_example_comes_before_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.chdir(tmp_path)
    assert find("gpt2")[1] == "megaloom.examples.gpt2:gpt2"
    assert find("./gpt2")[1] == str(tmp_path / "gpt2" / "config.json")


# Refusals


def test_a_missing_field_is_named() -> None:
    message = refused({k: v for k, v in LLAMA.items() if k != "hidden_size"})
    assert message == "config has no hidden_size; this architecture needs it: a whole number of at least 1"
    assert refused(LLAMA | {"hidden_size": None}) == message


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", "32", 'hidden_size must be a whole number of at least 1, got "32"'),
        ("hidden_size", 32.0, "hidden_size must be a whole number of at least 1, got 32.0"),
        ("num_attention_heads", 0, "num_attention_heads must be a whole number of at least 1, got 0"),
        ("num_hidden_layers", True, "num_hidden_layers must be a whole number of at least 1, got true"),
        ("rms_norm_eps", "small", 'rms_norm_eps must be a number of at least 0, got "small"'),
        ("rms_norm_eps", -1, "rms_norm_eps must be a number of at least 0, got -1.0"),
        ("rope_theta", float("nan"), "rope_theta must be a number of at least 0, got NaN"),
        ("rope_theta", 0, "rope_theta must be more than 1, got 0"),
        ("vocab_size", {1, 2}, 'vocab_size must be a whole number of at least 1, got "{1, 2}"'),
        ("tie_word_embeddings", 1, "tie_word_embeddings must be true or false, got 1"),
        ("rope_scaling", "llama3", 'rope_scaling must be an object, got "llama3"'),
        ("hidden_act", "gelu", 'hidden_act = "gelu" is not supported\nsupported: "silu"'),
        ("mlp_bias", 1, "mlp_bias must be true or false, got 1"),
    ],
)
def test_a_wrong_value_is_named(field: str, value: object, message: str) -> None:
    assert refused(LLAMA | {field: value}) == f"config: {message}"


SMALL = [json.loads(p.read_text()) for p in sorted(TESTS.glob("configs/small/*.json"))]


@given(st.data())
def test_whatever_a_config_says_is_read_or_refused(data: st.DataObject) -> None:
    fields = dict(data.draw(st.sampled_from(SMALL)))
    name = data.draw(st.sampled_from(sorted(fields)))
    if isinstance(fields[name], dict) and fields[name]:
        fields[name] = inner = dict(fields[name])
        changed, name = inner, data.draw(st.sampled_from(sorted(inner)))
    else:
        changed = fields
    numbers = st.integers(-3, 64) | st.floats()
    changed[name] = data.draw(st.none() | st.booleans() | numbers | st.text() | st.lists(numbers) | st.just({"a": 1}))
    with suppress(UserError):
        assert isinstance(read(fields), Model)


def test_what_nobody_reads_is_refused() -> None:
    message = refused(
        LLAMA | {"logit_scale": 0.5, "parallel_block": True, "use_cache": True, "residual_multiplier": None}
    )
    assert message.startswith("config: unknown fields logit_scale, parallel_block for LlamaForCausalLM\n")
    message = refused(LLAMA | {"_logit_scale": 0.5, "_attn_implementation": "sdpa", "_num_labels": 3})
    assert message.startswith("config: unknown field _logit_scale for LlamaForCausalLM\n")
    message = refused(LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}})
    assert message.startswith("config: unknown field rope_scaling.beta_fast for LlamaForCausalLM\n")


def test_unknown_architectures() -> None:
    message = refused(LLAMA | {"architectures": ["LlamaForCausalML"]})
    assert message.startswith(
        "config: architecture LlamaForCausalML is not supported: did you mean LlamaForCausalLM?\nsupported: "
    )
    assert "GPT2LMHeadModel" in message
    assert refused(LLAMA | {"architectures": ["Zzz"]}).startswith(
        "config: architecture Zzz is not supported\nsupported"
    )
    nameless = LLAMA | {"architectures": None, "model_type": "rnn"}
    assert refused(nameless).startswith(
        "config is not a Hugging Face config.json: it has no field `architectures`\nsupported: "
    )
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {**LLAMA}}
    assert "did you mean MistralForCausalLM?\nto plan its language model alone" in refused(whole)


def test_without_architectures_a_model_is_of_its_type() -> None:
    """As `config.save_pretrained` writes it of a config that no model was made of."""
    published = [json.loads(path.read_text()) for path in sorted(TESTS.glob("configs/*.json"))]
    typed = {fields["model_type"]: fields for fields in published if "model_type" in fields}
    assert len(typed) >= 16
    for fields in typed.values():
        assert fingerprint(read({k: v for k, v in fields.items() if k != "architectures"})) == fingerprint(read(fields))


def test_a_model_under_its_older_name() -> None:
    fields = json.loads((TESTS / "configs" / "t5-11b.json").read_text())
    assert fingerprint(read({**fields, "architectures": ["T5WithLMHeadModel"]})) == fingerprint(read(fields))
    multilingual = json.loads((TESTS / "configs" / "bert-base.json").read_text())
    pooler = {"directionality": "bidi", "pooler_fc_size": 768, "pooler_type": "first_token_transform"}
    assert fingerprint(read(multilingual | pooler)) == fingerprint(read(multilingual))


def test_files_that_are_no_config(tmp_path: Path) -> None:
    assert refused(tmp_path / "absent.json").startswith(f"cannot read {tmp_path / 'absent.json'}: ")
    assert refused(tmp_path).startswith(f"cannot read {tmp_path / 'config.json'}: ")
    for text in ("{", "\0", "[" * 100_000, '{"__float__": "x"}'):
        (tmp_path / "x.json").write_text(text)
        assert refused(tmp_path / "x.json").startswith(f"cannot read {tmp_path / 'x.json'}: ")
    (tmp_path / "x.json").write_text("[1]")
    assert refused(tmp_path / "x.json") == f"{tmp_path / 'x.json'} is not a config.json: it must hold a JSON object"


# Rotary positions, in either spelling


def turned(**fields: object) -> Rope:
    c = Config(fields, "config")
    result = rotation(c, 10_000.0, head_dim=64)
    assert not list(c.unread())
    return result


def test_the_old_and_the_new_spelling_say_the_same() -> None:
    llama = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    stretched = Rope(5e5, scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original=8192))
    assert turned(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **llama}) == stretched
    assert turned(rope_parameters={"rope_theta": 5e5, "rope_type": "llama3", **llama}) == stretched
    linear = {"type": "linear", "factor": 2.0}
    assert turned(rope_scaling=linear) == turned(rope_parameters=linear) == Rope(1e4, scaling=LinearScaling(2.0))
    assert turned() == turned(rope_scaling=None) == turned(rope_parameters={"rope_type": "default"}) == Rope(1e4)
    assert turned(partial_rotary_factor=0.5) == turned(rope_parameters={"partial_rotary_factor": 0.5}) == Rope(1e4, 32)


def test_yarn() -> None:
    fields = {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 16}
    scaling = YarnScaling(factor=40.0, original=4096, beta_fast=16.0, attention_factor=1.0)
    assert turned(rope_scaling=fields, max_position_embeddings=4096) == Rope(1e4, scaling=scaling)
    fields = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "truncate": False}
    assert turned(rope_scaling=fields).scaling == YarnScaling(factor=4.0, original=32768, truncate=False)


def test_each_kind_of_layer_has_its_own() -> None:
    fields = {"full": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}, "sliding": {"rope_theta": 1e4}}
    c = Config({"rope_parameters": fields}, "config")
    assert rope(c, kind="full") == Rope(1e6, scaling=LinearScaling(8.0))
    assert list(c.unread()) == ["rope_parameters.sliding"]
    assert rope(c, kind="sliding") == 10_000


def test_positions_that_are_not_known() -> None:
    for fields, message in (
        ({"rope_scaling": {"type": "longrope"}}, 'type = "longrope" is not supported\nsupported: "default", "linear"'),
        (
            {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}},
            "rope_theta = 1.0 is not supported\nrope_parameters.rope_theta is 2: give one",
        ),
    ):
        with pytest.raises(UserError, match=message):
            turned(**fields)


# Names


def tiny(layers: int = 2) -> Model:
    wte = weight("wte", Dim("vocab", 7), Dim("embed", 4))
    block = residual(RMSNorm(), SwiGLU(6)) >> residual(RMSNorm(), SwiGLU(6))
    return model("tiny", ids() >> Embed(wte) >> repeat(layers, block) >> RMSNorm() >> Unembed(wte))


LAYER = {
    "norm.weight": flat("rms_norm.0.scale"),
    "gate_up.weight": columns("swiglu.0.gate", "swiglu.0.up"),
    "down.weight": rows("swiglu.0.down"),
}
WHOLE = {"wte.weight": columns("wte"), "norm.weight": flat("rms_norm.0.scale")}
NAMES = Names(WHOLE, {"layers.{layer}.": LAYER})


def random(m: Model) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {n: torch.randn([d.known for d in s.dims], generator=draw) for n, s in graph(m).weights.items()}


def test_layers_are_told_apart_where_a_block_has_several() -> None:
    """Each iteration of the repeat is two layers to these names, and the last norm is outside of all."""
    m = tiny(3)
    weights = random(m)
    stored = to_checkpoint(NAMES, m, weights, torch.cat)
    assert len(stored) == 2 + 6 * 3
    for i in range(6):
        assert torch.equal(stored[f"layers.{i}.norm.weight"], weights[f"rms_norm.{i}.scale"])
        both = torch.cat((weights[f"swiglu.{i}.gate"].T, weights[f"swiglu.{i}.up"].T))
        assert torch.equal(stored[f"layers.{i}.gate_up.weight"], both)
        assert torch.equal(stored[f"layers.{i}.down.weight"], weights[f"swiglu.{i}.down"].T)
    assert torch.equal(stored["norm.weight"], weights["rms_norm.6.scale"])
    back = from_checkpoint(NAMES, m, stored, torch.cat)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[n], w) for n, w in weights.items())


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        (("embed", (JOIN, "ff")), lambda g, u: np.concatenate((g, u), 1)),
        ((("ff", JOIN, 1), "embed"), lambda g, u: np.stack((g, u), -1).transpose(1, 2, 0).reshape(12, 4)),
        ((("embed", JOIN, ...),), lambda g, u: np.concatenate((g, u), 1).reshape(-1)),
        ((1, (JOIN, 1), "ff", "embed"), lambda g, u: np.stack((g.T, u.T))[None]),
    ],
)
def test_joined_weights(axes: Any, expected: Any) -> None:
    m = tiny()
    names = Names(
        WHOLE, {"layers.{layer}.": LAYER | {"gate_up.weight": Stored(("swiglu.0.gate", "swiglu.0.up"), axes)}}
    )
    weights = random(m)
    stored = to_checkpoint(names, m, weights, torch.cat)
    want = expected(*(weights[f"swiglu.1.{n}"].numpy() for n in ("gate", "up")))
    np.testing.assert_array_equal(stored["layers.1.gate_up.weight"].numpy(), want)
    assert all(torch.equal(from_checkpoint(names, m, stored, torch.cat)[n], w) for n, w in weights.items())


def test_checkpoints_of_another_model() -> None:
    m = tiny()
    stored = to_checkpoint(NAMES, m, random(m), torch.cat)
    for change, message in (
        ({"extra.bias": torch.ones(1)}, r"unknown: extra.bias \[1\]"),
        ({"norm.weight": torch.ones(5)}, r"norm.weight has shape \[5\], not \[4\]"),
        ({"wte.weight": None}, r"missing: wte.weight \[7, 4\], which holds wte$"),
    ):
        changed = {k: v for k, v in (stored | change).items() if v is not None}
        with pytest.raises(UserError, match=message):
            from_checkpoint(NAMES, m, changed, torch.cat)
    with pytest.raises(UserError, match=r"missing: layers.4.norm.weight \[4\], which holds rms_norm.4"):
        from_checkpoint(NAMES, tiny(3), stored, torch.cat)


def test_what_else_a_checkpoint_may_have() -> None:
    """Names as they were, copies of a table, zeros, and what no output depends on: all of them checked."""
    m = tiny()
    weights = random(m)
    layers = {"layers.{layer}.": LAYER}
    beside = {"copies": {"head.weight": "wte.weight"}, "zero": ("bias",), "older": {"h.": "layers."}}
    names = Names(WHOLE, layers, unused=("layers.{layer}.mask", "layers.{beyond}.", "pooler."), **beside)
    stored = {name.replace("layers.", "h."): x for name, x in to_checkpoint(names, m, weights, torch.cat).items()}
    one = torch.ones(1)
    stored |= {"head.weight": stored["wte.weight"].clone(), "bias": 0 * one, "h.1.mask": one, "pooler.weight": one}
    stored |= {"h.4.norm.weight": one, "layers.11.x": one}
    back = from_checkpoint(names, m, stored, torch.cat)
    assert all(torch.equal(back[n], w) for n, w in weights.items())
    check_values(names, m, stored, equal)
    for change, message in (
        (
            {"head.weight": stored["wte.weight"] + 1},
            "head.weight differs from its wte.weight, but model 'tiny' shares one",
        ),
        ({"head.weight": one}, "head.weight differs from its wte.weight"),
        ({"bias": one}, "bias is not zero"),
    ):
        with pytest.raises(UserError, match=message):
            check_values(names, m, stored | change, equal)
    for name, message in (("h.3.x", "unknown: layers.3.x"), ("masks.1", "unknown: masks.1")):
        with pytest.raises(UserError, match=message):
            from_checkpoint(names, m, stored | {name: one}, torch.cat)


def equal(x: Tensor, y: Tensor | None) -> bool:
    return torch.equal(x, torch.zeros_like(x) if y is None else y)


def test_each_wrong_tensor_is_named_with_the_nearest() -> None:
    m = tiny()
    stored = to_checkpoint(NAMES, m, random(m), torch.cat)
    stored["layers.1.down_proj.weight"] = stored.pop("layers.1.down.weight")
    stored["layers.2.norm.weight"] = torch.ones(3)
    stored |= {f"x.{i}": torch.ones(1) for i in range(22)}
    with pytest.raises(UserError) as raised:
        from_checkpoint(NAMES, m, stored, torch.cat)
    first, *lines = str(raised.value).splitlines()
    assert first == "the tensors of the checkpoint are not those of model 'tiny'"
    assert lines[:3] == [
        "missing: layers.1.down.weight [4, 6], which holds swiglu.1.down; the nearest is layers.1.down_proj.weight",
        "layers.2.norm.weight has shape [3], not [4]",
        "unknown: layers.1.down_proj.weight [4, 6]; the nearest is layers.1.down.weight",
    ]
    assert lines[3:] == [*(f"unknown: x.{i} [1]" for i in range(19)), "and 3 more"]


def test_names_that_lack_some() -> None:
    for names, message in (
        (Names({}, NAMES.layers), r"no tensor name for wte, rms_norm.4.scale of model 'tiny'"),
        (Names(WHOLE), r"no tensor name for rms_norm.0.scale, swiglu.0.gate, .*, rms_norm.1.scale and 11 more"),
        (
            Names(WHOLE, {"h.{layer}.": {"norm": flat("rms_norm.0.scale")}}),
            "no tensor name for rms_norm.0.scale, swiglu",
        ),
    ):
        with pytest.raises(UserError, match=message):
            to_checkpoint(names, tiny(), random(tiny()), torch.cat)


# Configs that were refused although transformers runs them

COMMON = {"attention_dropout": 0.0, "initializer_range": 0.02, "torch_dtype": "bfloat16", "use_cache": True}
KIMI_K2 = COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 163840,
}
QWEN3_CODER = COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5472,
    "max_position_embeddings": 262144,
    "max_window_layers": 28,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "qkv_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.0,
    "shared_expert_intermediate_size": 0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_qk_norm": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_kimi_k2_has_its_published_trillion_parameters() -> None:
    assert params(read(KIMI_K2)) == pytest.approx(1.026e12, rel=1e-3)


def test_yarn_with_equal_betas_has_the_frequencies_of_transformers() -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    positions = turned(rope_theta=5e4, rope_scaling={"rope_type": "yarn", **scaling}, max_position_embeddings=131072)
    theirs = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "yarn", "rope_theta": 5e4, **scaling},
    )
    frequencies, magnitude = ROPE_INIT_FUNCTIONS["yarn"](theirs, device="cpu")
    assert positions.frequencies(64) == pytest.approx(frequencies.tolist(), rel=1e-5)
    assert positions.magnitude == pytest.approx(magnitude)


def test_qwen3_coder_is_qwen3_30b_a3b_with_another_base() -> None:
    theirs = params(find("qwen3-30b-a3b")[0])
    assert params(read(QWEN3_CODER)) == theirs
    for field, value in (("qkv_bias", True), ("use_qk_norm", False), ("shared_expert_intermediate_size", 64)):
        assert f"{field} = {json.dumps(value)} is not supported" in refused(QWEN3_CODER | {field: value})


def test_qwen3_without_head_dim() -> None:
    """As in transformers: hidden / heads with experts, 128 in dense models."""

    def head_dim(fields: dict[str, Any]) -> int:
        weights = graph(read({k: v for k, v in fields.items() if k != "head_dim"})).weights
        return weights["attention.0.q"].value.shape["head_dim"].known

    assert head_dim(QWEN3_CODER) == 2048 // 32
    dense = {"architectures": ["Qwen3ForCausalLM"], "qkv_bias": False}
    moe_only = ("moe", "num_exp", "norm_topk", "decoder_", "mlp_only", "router", "shared", "architectures")
    assert head_dim({k: v for k, v in QWEN3_CODER.items() if not k.startswith(moe_only)} | dense) == 128


def test_generation_fields_change_no_model() -> None:
    older = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "typical_p": 1.0, "repetition_penalty": 1.1, "num_beams": 4}
    assert fingerprint(read(LLAMA | older | {"internal_version": "abc"})) == fingerprint(read(LLAMA))


def test_every_generation_field_of_transformers_is_known() -> None:
    transformers = pytest.importorskip("transformers")
    fields = {k for k in transformers.GenerationConfig().to_dict() if not k.startswith("_")}
    assert not fields - UNUSED


def test_configs_that_transformers_saves_are_read_as_they_were(tmp_path: Path) -> None:
    """From a file, and from an object in memory, which has more fields."""
    transformers = pytest.importorskip("transformers")
    for fields in SMALL:
        theirs = getattr(transformers, fields["architectures"][0]).config_class.from_dict(fields)
        theirs.save_pretrained(tmp_path)
        theirs._attn_implementation = "eager"
        assert fingerprint(read(theirs)) == fingerprint(read(tmp_path))


def test_t5_with_another_activation_than_its_kind_is_refused() -> None:
    fields = json.loads((TESTS / "configs" / "small" / "t5-v1.1.json").read_text())
    assert fingerprint(read(fields | {"dense_act_fn": "gelu_new", "is_gated_act": True})) == fingerprint(read(fields))
    for field, value in (("dense_act_fn", "gelu"), ("is_gated_act", False), ("scale_decoder_outputs", 1)):
        assert field in refused(fields | {field: value})


def test_layers_without_experts_are_numbered() -> None:
    layers = {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    weights = graph(read(QWEN3_CODER | layers)).weights
    assert [n for n in weights if n.startswith("moe.") and n.endswith("router")] == ["moe.0.router"]
    assert weights["swiglu.3.down"].value.shape["ff"].known == QWEN3_CODER["intermediate_size"]
    message = 'mlp_only_layers = ["3"] is not supported\nsupported: an array of numbers of layers, from 0'
    assert refused(QWEN3_CODER | {"mlp_only_layers": ["3"]}) == f"config: {message}"


@pytest.mark.parametrize(("limit", "works"), [(float("inf"), True), (1e308, True), (3.5e38, True), (0.1, False)])
def test_steps_of_a_state_space_without_a_limit(limit: float, works: bool) -> None:
    fields = json.loads((TESTS / "configs" / "small" / "mamba2.json").read_text())
    if works:
        assert fingerprint(read(fields | {"time_step_limit": [0.0, limit]})) == fingerprint(read(fields))
    else:
        assert "time_step_limit = [0.0, 0.1] is not supported" in refused(fields | {"time_step_limit": [0.0, limit]})


class Described:
    """A stand-in for a configuration of transformers, which these tests do not import."""

    def to_dict(self) -> dict[str, object]:
        return dict(LLAMA)


def test_an_object_with_a_configuration_is_read() -> None:
    class Loaded:
        config = Described()

    for it in (Described(), Loaded()):
        assert fingerprint(read(it)) == fingerprint(read(LLAMA))
    with pytest.raises(UserError, match=r"a list does not describe a Hugging Face model\ngive a config.json"):
        read([1])


def test_a_model_type_with_a_hyphen_names_an_architecture() -> None:
    fields = json.loads((TESTS / "configs/small/megatron_bert.json").read_text())
    del fields["architectures"]
    assert read(fields | {"model_type": "megatron-bert"}).outputs
