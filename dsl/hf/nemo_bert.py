"""Configurations of Megatron's BERT as NeMo takes them, in JSON or YAML, as the fields of a config.json.

    {"hidden-size": 1024, "num-attention-heads": 16, "num-layers": 24, "max-seq-length": 512}

    model:
      language_model:
        config: {hidden_size: 1024, num_attention_heads: 16, num_layers: 24, max_position_embeddings: 512}

A name that has no counterpart is refused, unless its value is null.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_file import MEGATRON_SIZES, read_text
from megaloom.dsl.files.yaml_file import pyyaml

FIELDS = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size",
    "max_seq_length": "max_position_embeddings",
    "max_position_embeddings": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "padded_vocab_size": "vocab_size",
    "num_tokentypes": "type_vocab_size",
    "hidden_dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "layernorm_epsilon": "layer_norm_eps",
    "init_method_std": "initializer_range",
}
"""Names of Megatron-LM and NeMo, with underscores, and their fields of a config.json."""

DEFAULTS = {"model_type": "megatron-bert", "architectures": ["MegatronBertForMaskedLM"], "layer_norm_eps": 1e-5}
"""Fields of a config.json that NeMo's configurations leave out: the architecture, and Megatron-LM's epsilon."""
PATH = ("model", "language_model", "config")
"""Tables of a YAML file in which the fields stand, from the outside."""


def is_nemo_bert(raw: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether contents of a file are a configuration of this kind."""
    if not isinstance(raw, Mapping) or not raw.keys().isdisjoint(("architectures", "model_type")):
        return False
    return MEGATRON_SIZES <= {_plain(name) for name in _inside(raw)}


def config_fields_of(raw: Mapping[str, Any], where: str) -> dict[str, object]:
    """Return the fields of a config.json. Raise UserError for names that have no counterpart. where: the file."""
    if unknown := [*_outside(raw)]:
        raise UserError(
            f"{where}: {unknown[0]} describes no model\n"
            f"remove it: the model is {'.'.join(PATH)}; data, weights (--from) and training are options of the command"
        )
    out: dict[str, object] = dict(DEFAULTS)
    for name, value in _inside(raw).items():
        if value is None:
            continue
        if (field := FIELDS.get(_plain(name))) is None:
            known = ", ".join(FIELDS)
            raise UserError(
                f"{where}: {name} is not translated\nremove it if it does not change the model; known: {known}"
            )
        if out.get(field, value) != value and field not in DEFAULTS:
            raise UserError(f"{where}: {field} is given twice, as {out[field]!r} and as {value!r} ({name})\nremove one")
        out[field] = value
    if isinstance(size := out.get("hidden_size"), int):
        out.setdefault("intermediate_size", 4 * size)
    return out


def read_yaml(path: Path) -> object:
    """Return the contents of a YAML file. Raise UserError if it cannot be read."""
    yaml = pyyaml(path, "JSON")
    try:
        return yaml.safe_load(read_text(path))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        text = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise UserError(f"cannot read {path}: {text}\ngive a YAML file with {'.'.join(PATH)}") from None


def _plain(name: object) -> str:
    return str(name).replace("-", "_")


def _inside(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the innermost table of PATH that is there."""
    for name in PATH:
        inner = raw.get(name)
        raw = inner if isinstance(inner, Mapping) else raw
    return raw


def _outside(raw: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names that stand beside the tables of PATH and are not null."""
    before = ""
    for name in PATH:
        if isinstance(inner := raw.get(name), Mapping):
            yield from (f"{before}{other}" for other, value in raw.items() if other != name and value is not None)
            raw, before = inner, f"{before}{name}."
