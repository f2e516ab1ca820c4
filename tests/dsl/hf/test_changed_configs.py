"""Fields of a config.json that --set replaces, and configurations of Megatron's BERT as NeMo takes them."""

import json
from pathlib import Path

import pytest

from megaloom.dsl import LayerNorm
from megaloom.dsl.catalog import config_fields, file_name, find
from megaloom.dsl.errors import UserError
from megaloom.dsl.facts.parameters import params
from megaloom.dsl.files.json_form import fingerprint
from megaloom.dsl.settings.arguments import words_as_arguments
from megaloom.examples.bert import bert

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}
SIZES = {"hidden-size": 64, "num-attention-heads": 4, "num-layers": 2, "max-seq-length": 32}
YAML = """model:
    language_model:
        pretrained_model_name: null
        config:
            hidden_size: 64
            num_attention_heads: 4
            num_layers: 2
            max_position_embeddings: 32
"""


def test_fields_of_a_config_are_replaced(tmp_path: Path) -> None:
    file = tmp_path / "llama.json"
    file.write_text(json.dumps(LLAMA))
    assert config_fields(find(str(file))[1]) is None
    model, ref = find(
        str(file), words_as_arguments(["num_hidden_layers=2", "rms_norm_eps=1e-6", "attention_bias=true"])
    )
    changes = {"num_hidden_layers": 2, "rms_norm_eps": 1e-6, "attention_bias": True}
    assert config_fields(ref) == LLAMA | changes
    other = tmp_path / "other.json"
    other.write_text(json.dumps(LLAMA | changes))
    assert fingerprint(model) == fingerprint(find(str(other))[0]) == fingerprint(find(ref)[0])
    assert file_name(ref).startswith("llama-num-hidden-layers-2")


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("num_hidden_layers=two", "num_hidden_layers must be a whole number, got 'two'"),
        ("num_hidden_layers=-1", "num_hidden_layers"),
        ("layers=2", "unknown field layers for LlamaForCausalLM"),
        ("tie_word_embeddings=maybe", "tie_word_embeddings must be true or false, got 'maybe'"),
    ],
)
def test_wrong_fields_are_refused(tmp_path: Path, word: str, says: str) -> None:
    file = tmp_path / "llama.json"
    file.write_text(json.dumps(LLAMA))
    with pytest.raises(UserError, match=says):
        find(str(file), words_as_arguments([word]))


def test_a_model_of_the_catalogue_takes_the_arguments_of_its_family() -> None:
    model, ref = find("bert-large", words_as_arguments(["layers=2", "heads=8"]))
    assert ref == "megaloom.examples.bert:bert_large(layers=2, heads=8)"
    assert fingerprint(model) == fingerprint(find(ref)[0]) == fingerprint(bert("bert-large", 2, 8, 1024, 4096))
    assert params(find("t5-small", words_as_arguments(["layers=2"]))[0]) < params(find("t5-small")[0])
    with pytest.raises(UserError, match="bert_large has no parameter 'layer': did you mean layers"):
        find("bert-large", words_as_arguments(["layer=2"]))
    with pytest.raises(UserError, match="ff must be a Layer, which has no form as text"):
        find("t5-small", words_as_arguments(["ff=2048"]))


def test_megatrons_bert_by_nemos_names(tmp_path: Path) -> None:
    """JSON with dashes and YAML with tables are one model, whose vocabulary --set gives."""
    yaml, file = tmp_path / "bert.yaml", tmp_path / "bert.json"
    yaml.write_text(YAML)
    file.write_text(json.dumps(SIZES))
    norm = LayerNorm(1e-5)
    options = {"vocab": 256, "seq": 32, "dropout": 0.1, "pre_norm": True, "norm": norm}
    for path in (yaml, file):
        with pytest.raises(UserError, match="has no vocab_size; this architecture needs it"):
            find(str(path))
        model, ref = find(str(path), words_as_arguments(["vocab_size=256", "num_layers=3"]))
        assert fingerprint(model) == fingerprint(bert("bert", 3, 4, 64, 256, **options)) == fingerprint(find(ref)[0])
        kept = config_fields(ref)
        assert kept is not None
        (tmp_path / "config.json").write_text(json.dumps(kept))
        assert fingerprint(find(str(tmp_path))[0]) == fingerprint(model)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kv-channels": 8}, "kv-channels is not translated"),
        ({"max_position_embeddings": 64}, "max_position_embeddings is given twice, as 32 and as 64"),
    ],
)
def test_names_without_a_counterpart_are_refused(tmp_path: Path, change: dict[str, object], says: str) -> None:
    file = tmp_path / "bert.json"
    file.write_text(json.dumps(SIZES | {"vocab-size": 256} | change))
    with pytest.raises(UserError, match=says):
        find(str(file))


def test_tables_of_nemo_that_describe_no_model_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "bert.yaml"
    file.write_text(YAML + "trainer:\n    devices: 2\n")
    with pytest.raises(UserError, match="trainer describes no model\nremove it"):
        find(str(file))
    file.write_text(YAML.replace("pretrained_model_name: null", "lm_checkpoint: /raid/bert"))
    with pytest.raises(UserError, match=r"model\.language_model\.lm_checkpoint describes no model"):
        find(str(file))
