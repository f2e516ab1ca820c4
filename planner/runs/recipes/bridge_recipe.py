"""A recipe of Megatron-Bridge as its settings: sections of the configuration, and the name of the model."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.settings.bridge import CONTAINER_FIELDS, bridge_run
from megaloom.planner.runs.settings.bridge_precision import RECIPE
from megaloom.planner.runs.settings.flag_words import SettingsRun
from megaloom.planner.runs.settings.tree import Setting, Tree, is_null, overlaid, setting_at
from megaloom.planner.runs.words import Word

from .values import Instance, Known, Value, as_tree

SECTIONS = ("model", "train", "ddp", "optimizer", "dataset", "comm_overlap", "mixed_precision", "tokenizer")
CONTAINER = "ConfigContainer"
HUB_METHOD = "from_hf_pretrained"
SILENT = frozenset({"persist_layer_norm", "use_te_rng_tracker", "use_transformer_engine_full_layer_spec"})
LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
"""Layers of a pipeline's stages in Megatron-LM's `--pipeline-model-parallel-layout`."""


def bridge_recipe_run(config: Value, path: str, overrides: Tree, environment: Mapping[str, str]) -> SettingsRun:
    """Return the run of a configuration with settings that count more. Raise UserError for one that adapts weights."""
    if not isinstance(config, Instance) or not isinstance(config.fields.get("model"), Instance):
        raise UserError(f"{path} builds no configuration of Megatron-Bridge with a model")
    if config.last != CONTAINER:
        what = f"{config.origin}: what {config.last} sets is not known, since its file is not there"
        raise UserError(f"{what}\nread it beside a clone of Megatron-Bridge, or where it is installed")
    for key in config.fields:
        if key not in CONTAINER_FIELDS:
            raise UserError(f"{config.origin}: {CONTAINER} has no field {key:.40}")
    peft = config.fields.get("peft")
    if peft is not None and not (isinstance(peft, Known) and peft.value is None):
        raise UserError(f"{config.origin}: adapters of Megatron-Bridge are not modelled")
    tree: dict[str, Tree] = {}
    for name in SECTIONS:
        value = config.fields.get(name)
        section = _precision(value) if name == "mixed_precision" else as_tree(value)
        section = _tokenizer(section) if name == "tokenizer" else section
        if section is not None:
            tree[name] = _model(section, config) if name == "model" and isinstance(section, Mapping) else section
    run = bridge_run(overlaid(tree, overrides) or {}, environment)
    model = config.fields["model"]
    return evolve(run, model=_hub_name(model) if isinstance(model, Instance) else None)


def _model(section: Mapping[str, Tree], config: Instance) -> Tree:
    """Return the section of the model without what changes no step, and with its stages as Megatron-LM writes them."""
    kept = {name: value for name, value in section.items() if name not in SILENT}
    model = config.fields["model"]
    stages = model.fields.get("pipeline_model_parallel_layout") if isinstance(model, Instance) else None
    if isinstance(stages, list):
        text = "|".join("".join(map(_letter, stage if isinstance(stage, list) else [stage])) for stage in stages)
        kept["pipeline_model_parallel_layout"] = Setting(Word(text, model.origin))  # type: ignore[union-attr]
    return kept


def _tokenizer(section: Tree | None) -> Tree | None:
    """Return what a tokenizer says of the model's vocabulary: nothing, unless the model takes its number of tokens."""
    switch = setting_at(section, "use_tokenizer_vocab_size")
    if section is None or not (switch and switch.is_true):
        return None
    kind, size = setting_at(section, "tokenizer_type"), setting_at(section, "vocab_size")
    if not (kind and kind.text == "NullTokenizer"):
        return {"use_tokenizer_vocab_size": switch}
    if isinstance(section, Mapping) and size and size.text == "vocab_size":  # that of the model, which is published
        return {"tokenizer_type": kind}
    return section


def _letter(layer: Value) -> str:
    return LETTERS.get(str(layer.value), "?") if isinstance(layer, Known) else "?"


def _precision(value: Value | None) -> Tree | None:
    """Return the fields of mixed precision: of `MixedPrecisionConfig`, or of a named recipe and what is set later."""
    if not isinstance(value, Instance):
        named = as_tree(value)
        return {RECIPE: named} if isinstance(named, Setting) and not is_null(named) else named
    fields = as_tree(value)
    if value.last == "MixedPrecisionConfig" or not isinstance(fields, Mapping):
        return fields
    given = as_tree(value.arguments[0]) if value.arguments and isinstance(value.arguments[0], Known) else None
    return {RECIPE: given or Setting(Word(value.last, value.origin)), **fields}


def _hub_name(model: Instance | None) -> Word | None:
    """Return the name on huggingface.co from which a model is made."""
    while model is not None:
        if model.last == HUB_METHOD and model.arguments and isinstance(name := model.arguments[0], Known):
            return Word(str(name.value), name.origin)
        model = model.base
    return None
