"""A Python configuration of torchtitan (0.3 and later) as options of its command line, as its TOML files had them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.settings.flag_words import SettingsRun
from megaloom.planner.runs.settings.near_names import nearly_spelled
from megaloom.planner.runs.settings.torchtitan import torchtitan_run
from megaloom.planner.runs.settings.torchtitan_cli import option_tree
from megaloom.planner.runs.settings.tree import Setting, Tree, found, overlaid, setting_at
from megaloom.planner.runs.words import Origin, Word

from .values import Foreign, Instance, Known, Value, as_tree

TITAN_DEFAULTS = {"local_batch_size": "8", "seq_len": "2048"}
"""torchtitan's defaults of training in 0.3.0."""
MICROBATCH_TOKENS, CONTEXT_TOKENS = 16384, 2048
"""Defaults of training after 0.3.0: tokens of a micro-batch, and of a sequence."""
TOKEN_FIELDS = ("num_tokens_per_microbatch_per_dp_rank", "max_context_length", "num_tokens_per_train_step")
"""Fields of training after 0.3.0, which counts tokens instead of sequences."""
PIPELINE_MICROBATCHES = "num_pp_microbatches"
AC_CLASSES = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget"}
AC_CONFIG = "ActivationCheckpointConfig"
"""Class of all of them until early 2026, with a field `mode`."""
TITAN_SECTIONS = {"training": "TrainingConfig", "parallelism": "ParallelismConfig", "compile": "CompileConfig"}
"""Sections that are read, and the classes of their values."""
_SECTIONS = (*TITAN_SECTIONS, "model_spec", "activation_checkpoint")
OF_MODEL = ("num_mtp_layers", "tp_gemm_backend")
"""Arguments of `model_registry` that change a step, with names of our own in the section of the model."""


def titan_run(config: Value, path: str, overrides: Sequence[Word] = ()) -> SettingsRun:
    """Return the run of a configuration and options after it. Raise UserError if it names no flavor of a model."""
    spec = config.fields.get("model_spec") if isinstance(config, Instance) else None
    flavor = _flavor(spec)
    if not isinstance(config, Instance) or not isinstance(spec, Instance) or flavor is None:
        if isinstance(config, Instance) and spec is None and config.name:
            raise UserError(f"{config.origin}: what {config.name} makes is not known, since its file is not read")
        raise UserError(f"{path} builds no configuration of torchtitan with a flavor of a model")
    for key, value in config.fields.items():
        if key not in _SECTIONS and any(nearly_spelled(key, one) for one in _SECTIONS):
            raise UserError(f"{_line(value, config.origin)}: the section {key:.40} of torchtitan is not known")
    tree: dict[str, Tree] = {"model": _model(spec, flavor, path), "activation_checkpoint": {"mode": _mode(config)}}
    if (recipe := _float8_recipe(spec)) is not None:
        tree["quantize"] = {"linear": {"float8": {"recipe_name": recipe}}}
    for name, kind in TITAN_SECTIONS.items():
        tree[name] = _section(config, name, kind)
    joined = overlaid(tree, option_tree(overrides)) or {}
    run = torchtitan_run(_in_sequences(joined, config.origin))
    beside = [Word(key, _line(value, config.origin)) for key, value in config.fields.items() if key not in _SECTIONS]
    return evolve(run, version=_release(joined), left_out=(*beside, *run.left_out))


def _line(value: Value, otherwise: Origin) -> Origin:
    return value.origin if isinstance(value, Instance | Known | Foreign) else otherwise


def _release(tree: Tree) -> str:
    """Return the release by the fields that the file sets: 0.3 counts sequences, what comes after it counts tokens."""
    training = found(tree, "training")
    stated = training if isinstance(training, Mapping) else {}
    if any(name in stated for name in TOKEN_FIELDS):
        return "after 0.3"
    return "0.3" if stated.keys() & {"local_batch_size", "seq_len", "global_batch_size"} else ""


def _flavor(spec: Value | None) -> Known | None:
    if not isinstance(spec, Instance):
        return None
    value = spec.arguments[0] if spec.arguments else spec.fields.get("flavor")
    return value if isinstance(value, Known) else None


def _model(spec: Instance, flavor: Known, path: str) -> Tree:
    """Return the names of the model and its flavor, and what else the call of its registry sets."""
    parts = spec.name.split(".")
    folder = parts[-2] if len(parts) > 1 else Path(path).absolute().parent.name
    section: dict[str, Tree] = {
        "name": Setting(Word(folder, spec.origin)),
        "flavor": Setting(Word(str(flavor.value), flavor.origin)),
    }
    for name in OF_MODEL:
        if (tree := as_tree(spec.fields.get(name))) is not None:
            section[name] = tree
    converters = spec.fields.get("converters")
    names = [one.name for one in converters if isinstance(one, Instance)] if isinstance(converters, list) else []
    if kinds := [part.lower() for name in names for part in name.split(".") if part.endswith("Converter")]:
        section["converters"] = Setting(Word(",".join(kinds), spec.origin))
    return section


def _float8_recipe(spec: Instance) -> Setting | None:
    """Return the recipe of products in 8 bits; `rowwise` is the default of 0.3. None without them."""
    converters = spec.fields.get("converters")
    for one in converters if isinstance(converters, list) else []:
        if isinstance(one, Instance) and "Float8LinearConverter" in one.name:
            stated = one.fields.get("recipe_name")
            return Setting(Word(str(stated.value) if isinstance(stated, Known) else "rowwise", one.origin))
    return None


def _section(config: Instance, name: str, kind: str) -> Tree:
    """Return the fields of a section. Raise UserError for one that a function makes whose file is not there."""
    value = config.fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, Instance) or value.last != kind:
        raise UserError(f"{_line(value, config.origin)}: {name} is no {kind} with fields that are known")
    tree = as_tree(value)
    return tree if tree is not None else {}


def _mode(config: Instance) -> Setting:
    """Return the mode of activation checkpointing by the class of its configuration; selective is the default."""
    value = config.fields.get("activation_checkpoint")
    if isinstance(value, Known) and value.value is None:
        return Setting(Word("none", value.origin))
    if value is None:
        return Setting(Word("selective", config.origin))
    name = value.name if isinstance(value, Instance | Foreign) else ""
    mode = next((mode for kind, mode in AC_CLASSES.items() if kind in name.split(".")), None)
    if isinstance(value, Instance) and value.last == AC_CONFIG:
        stated = value.fields.get("mode")
        mode = str(stated.value) if isinstance(stated, Known) else None if stated else "selective"
    origin = value.origin if isinstance(value, Instance | Foreign | Known) else config.origin
    if mode is None:
        raise UserError(f"{origin}: activation_checkpoint is none of {', '.join(AC_CLASSES)}")
    return Setting(Word(mode, origin))


def _in_sequences(tree: Tree, origin: Origin) -> Tree:
    """Return the settings with batch sizes in sequences, where a release after 0.3.0 counts tokens."""
    training = found(tree, "training")
    by_tokens = isinstance(training, Mapping) and any(name in training for name in TOKEN_FIELDS)
    if not by_tokens and setting_at(tree, f"parallelism.{PIPELINE_MICROBATCHES}") is None:
        defaults: Tree = {name: Setting(Word(text, origin)) for name, text in TITAN_DEFAULTS.items()}
        return overlaid({"training": defaults}, tree) or tree
    micro = _number(tree, f"training.{TOKEN_FIELDS[0]}", MICROBATCH_TOKENS, origin)
    context = _number(tree, f"training.{TOKEN_FIELDS[1]}", CONTEXT_TOKENS, origin)
    step = _number(tree, f"training.{TOKEN_FIELDS[2]}", -1, origin)
    times = _number(tree, f"parallelism.{PIPELINE_MICROBATCHES}", 1, origin)
    for word in (micro, step):
        if int(word.text) > 0 and int(word.text) % int(context.text):
            what = f"{word.text} tokens are no whole number of sequences of {context.text}"
            raise UserError(f"{word.origin}: {what}, which is not modelled")
    sequences = int(micro.text) // int(context.text)
    in_pipeline = _number(tree, "parallelism.pipeline_parallel_degree", 1, origin).text != "1"
    local = sequences * int(times.text) if in_pipeline else sequences
    changed: dict[str, Tree] = {
        "seq_len": Setting(context),
        "local_batch_size": Setting(evolve(micro, text=str(local))),
    }
    if int(step.text) > 0:
        changed["global_batch_size"] = Setting(evolve(step, text=str(int(step.text) // int(context.text))))
    size = Setting(evolve(micro, text=str(sequences)))
    made: Tree = {"training": changed, "parallelism": {"pipeline_parallel_microbatch_size": size}}
    return overlaid(tree, made) or tree


def _number(tree: Tree, path: str, default: int, origin: Origin) -> Word:
    """Return a whole number of the settings. Raise UserError for another text, and for 0."""
    value = setting_at(tree, path)
    word = value.word if value else Word(str(default), origin)
    if word.unknown or not word.text.removeprefix("-").isdecimal() or int(word.text) == 0:
        raise UserError(f"{word.origin}: {path} is not known")
    return word
