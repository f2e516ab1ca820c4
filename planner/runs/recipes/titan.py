"""A Python configuration of torchtitan as options of its command line, as its TOML files had them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.settings.flag_words import SettingsRun
from megaloom.planner.runs.words import Word

from .values import Foreign, Instance, Known, Value

MICROBATCH_TOKENS, CONTEXT_TOKENS, STEP_TOKENS = 16384, 2048, -1
"""torchtitan's defaults of training: tokens of a micro-batch, of a sequence, of a step; -1 is one micro-batch."""
MODES = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget"}
PARALLELISM = (
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
    "context_parallel_degree",
    "expert_parallel_degree",
)


def titan_run(config: Value, path: str, overrides: Sequence[Word] = ()) -> SettingsRun:
    """Return the run of a configuration and options after it. Raise UserError if it names no flavor of a model."""
    spec = config.fields.get("model_spec") if isinstance(config, Instance) else None
    flavor = spec.arguments[0] if isinstance(spec, Instance) and spec.arguments else None
    if not isinstance(config, Instance) or not isinstance(spec, Instance) or not isinstance(flavor, Known):
        raise UserError(f"{path} builds no configuration of torchtitan with a flavor of a model")
    model = _folder(spec, path)
    words = tuple(word for name, value in _options(config, spec, flavor, model) for word in _pair(name, value))
    return SettingsRun(framework="torchtitan", words=(*words, *option_words(overrides)), program="torchtitan.train")


def option_words(words: Sequence[Word]) -> Iterator[Word]:
    """Yield `--name value` and `--name=value` as two words each; a flag without a value is true."""
    for position, word in enumerate(words):
        name, equals, value = word.text.partition("=")
        if not name.startswith("--"):
            continue
        after = words[position + 1] if position + 1 < len(words) else None
        yield evolve(word, text=name)
        if equals:
            yield evolve(word, text=value)
        else:
            yield evolve(word, text="true") if after is None or after.text.startswith("--") else after


def _folder(spec: Instance, path: str) -> str:
    """Return the name of the model: the folder of the module that registers it, or else that of the file."""
    parts = spec.name.split(".")
    return parts[-2] if len(parts) > 1 else Path(path).absolute().parent.name


def _pair(name: str, value: Known) -> Iterator[Word]:
    yield Word(f"--{name}", value.origin)
    yield Word(str(value.value), value.origin)


def _options(config: Instance, spec: Instance, flavor: Known, model: str) -> Iterator[tuple[str, Known]]:
    yield "model.name", Known(model, spec.origin)
    yield "model.flavor", flavor
    converters = spec.fields.get("converters")
    names = [one.name for one in converters if isinstance(one, Instance)] if isinstance(converters, list) else []
    if kinds := [part.lower() for name in names for part in name.split(".") if part.endswith("Converter")]:
        yield "model.converters", Known(",".join(kinds), spec.origin)
    yield from _training(config)
    parallelism = config.fields.get("parallelism")
    for name in PARALLELISM:
        value = parallelism.fields.get(name) if isinstance(parallelism, Instance) else None
        if isinstance(value, Known):
            yield f"parallelism.{name}", value
    yield "activation_checkpoint.mode", _mode(config)


def _training(config: Instance) -> Iterator[tuple[str, Known]]:
    training = config.fields.get("training")
    fields = training.fields if isinstance(training, Instance) else {}
    origin = training.origin if isinstance(training, Instance) else config.origin

    def number(name: str, default: int) -> Known:
        value = fields.get(name, Known(default, origin))
        if not isinstance(value, Known) or not isinstance(value.value, int):
            raise UserError(f"{origin}: training.{name} is not known")
        return value

    tokens, context = (
        number("num_tokens_per_microbatch_per_dp_rank", MICROBATCH_TOKENS),
        number("max_context_length", CONTEXT_TOKENS),
    )
    step = number("num_tokens_per_train_step", STEP_TOKENS)
    assert isinstance(tokens.value, int) and isinstance(context.value, int) and isinstance(step.value, int)
    yield "training.seq_len", context
    yield "training.local_batch_size", Known(max(1, tokens.value // max(1, context.value)), tokens.origin)
    if step.value > 0:
        yield "training.global_batch_size", Known(step.value // max(1, context.value), step.origin)
    for name in ("mixed_precision_param", "mixed_precision_reduce"):
        if isinstance(value := fields.get(name), Known):
            yield f"training.{name}", value


def _mode(config: Instance) -> Known:
    value = config.fields.get("activation_checkpoint")
    if isinstance(value, Known) and value.value is None:
        return Known("none", value.origin)
    name = value.name if isinstance(value, Instance | Foreign) else "SelectiveAC"
    mode = next((mode for kind, mode in MODES.items() if kind in name), "selective")
    return Known(mode, value.origin if isinstance(value, Instance) else config.origin)
