"""The registry of Hugging Face architectures: a config.json becomes a `Model`.

A module of the examples marks its function from a `Config` to a `Model` with `@reads("LlamaForCausalLM", names=...)`.
`read` finds that function by the architecture that a config.json names. Every field of the config must be known (see
`fields`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from functools import partial
from math import inf
from os.path import isdir
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.example_modules import example_modules
from megaloom.dsl.files.json_file import read_json
from megaloom.dsl.files.yaml_file import YAML
from megaloom.dsl.graph import Model, graph
from megaloom.dsl.layers.moe import MoE
from megaloom.dsl.ops.weight import INITIAL_STD

from .fields import Config, rope, rotation
from .nemo_bert import config_fields_of, is_nemo_bert, read_yaml
from .stored_names import stored_names
from .tensor_names import Names, checkpoint_tensors

SIMILARITY = 0.7  # of names (difflib), from which a known architecture is suggested for an unknown one
WANTED = "MODEL can be file.py:name, a Hugging Face config.json, or the name of an example, such as llama3-8b"
INNER_MODEL = "to plan its language model alone, save its text_config as a config.json"

__all__ = [
    "Config",
    "Reader",
    "config_file",
    "config_name",
    "open_config",
    "read",
    "reader",
    "reads",
    "rope",
    "rotation",
]


@frozen
class Reader:
    """The function that makes models of some architectures from a config.json, and the tensor names of checkpoints."""

    architectures: tuple[str, ...]
    model: Callable[[Config, str], Model]
    names: Names
    std: float = INITIAL_STD  # of initial weights, for configs that have none
    std_field: str = "initializer_range"

    def __call__(self, config: Config, name: str) -> Model:
        """Return the model. Raises UserError for a field that is missing, wrong or unknown."""
        model = evolve(self.model(config, name), std=config.number(self.std_field, self.std))
        if unread := list(config.unread()):
            fields = "unknown field" if len(unread) == 1 else "unknown fields"
            raise UserError(
                f"{config.where}: {fields} {', '.join(unread)} for {self.architectures[0]}\n"
                "remove a field if it does not change the model"
            )
        return evolve(model, unused=tuple(config.unused()))


def reads(
    *architectures: str, names: Names, std: float = INITIAL_STD, std_field: str = "initializer_range"
) -> Callable[[Callable[[Config, str], Model]], Reader]:
    """Return a decorator for the function that makes a model of these architectures from a config.json.

    std_field: the field with the standard deviation of initial weights; std: that of configs without it.
    """
    return lambda function: Reader(architectures, function, names, std, std_field)


def read(config: object, *, balance: float | None = None) -> Model:
    """Return the model that a config.json describes: a file, a folder with one, its fields, or a transformers object.

    A configuration of transformers, or a model with one, stands for the fields of its `to_dict()`.

    The model has the name of the file or, for a file named config.json, of its folder. balance: the coefficient of the
    balancing loss of experts. By default it is the config's if `output_router_logits` is true, else 0, as in training
    by Hugging Face's code. Raises UserError for an unknown architecture, and for a field that is missing, wrong or
    unknown.
    """
    opened, name = open_config(config)
    if balance is None:
        return reader(opened)(opened, name)
    if not 0 <= balance < inf:
        raise UserError(f"balance must be at least 0, got {balance:g}")
    read = reader(opened)(evolve(opened, balance=balance), name)
    if not any(isinstance(n.op, MoE) for n in graph(read).nodes):
        raise UserError(f"{opened.where} has no experts, whose load `balance` would balance\nomit --set balance")
    return read


def open_config(config: object) -> tuple[Config, str]:
    """Return the fields of a config.json and the name for its model. Raises UserError for another kind of object."""
    if isinstance(config, ChangedConfig):
        opened, name = open_config(config.file)
        return evolve(opened, fields={**opened.fields, **config.changes}), name  # `--set` has checked their names
    described = getattr(config, "config", config)  # of a model of transformers
    tensors = partial(_untied, config) if hasattr(config, "named_parameters") else tuple
    if not isinstance(config, str | Path | Mapping):
        if not hasattr(described, "to_dict"):
            raise UserError(
                f"a {type(config).__name__} does not describe a Hugging Face model\n"
                "give a config.json, its folder, its fields, or a configuration of transformers"
            )
        config = described.to_dict()
    if isinstance(config, Mapping):
        name = config.get("_name_or_path") or config.get("model_type") or "model"
        return Config(config, "config", tensors=tensors), Path(str(name)).name
    assert isinstance(config, str | Path)
    path = config_file(config)
    try:
        fields = read_yaml(path) if path.suffix in YAML else read_json(path, object_hook=_number)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}\n{WANTED}") from error
    if is_nemo_bert(fields):
        fields = config_fields_of(fields, str(path))
    if not isinstance(fields, dict):
        raise UserError(f"{path} is not a config.json: it must hold a JSON object")
    return Config(fields, str(path), tensors=partial(stored_names, path.parent)), config_name(path)


@frozen
class ChangedConfig:
    """A config.json some of whose fields have other values."""

    file: str | Path
    changes: Mapping[str, object]


def changed_config(file: str | Path, changes: Mapping[str, object]) -> str | Path | ChangedConfig:
    """Return what `read` takes for a config.json with other values of some fields; without any, the file itself."""
    return ChangedConfig(file, changes) if changes else file


def _untied(model: Any) -> frozenset[str]:
    """Return the names of the parameters of a torch module, a shared one by its first name alone."""
    return frozenset(name for name, _ in model.named_parameters())


def _number(fields: dict[str, Any]) -> Any:
    """Return a number that JSON cannot express, as Hugging Face writes it: {"__float__": "Infinity"}."""
    number = fields.get("__float__")
    return float(number) if len(fields) == 1 and isinstance(number, str) else fields


def config_name(path: Path) -> str:
    """Return the name for the model of a file: its stem or, for a config.json, the name of its folder."""
    return path.resolve().parent.name if path.name == "config.json" else path.stem


def config_file(config: str | Path) -> Path:
    """Return the path itself or, for a folder, that of its config.json."""
    path = Path(config)
    return path / "config.json" if isdir(path) else path


def reader(config: Config) -> Reader:
    """Return the reader for the architecture of a config. Raises UserError if there is none."""
    known = {a: r for r in _readers() for a in r.architectures}
    named = [str(a) for a in config.array("architectures", [])]
    kinds = {_kind(a): a for a in reversed(known)}  # the first architecture of a kind
    kind = config.text("model_type", "").removesuffix("_text").replace("_", "").replace("-", "")
    if "stages" in config.fields and not named:
        raise UserError(f"{config.where} is a plan, not a model\nto show it: megaloom explain {config.where}")
    if not named and kind not in kinds:
        raise UserError(
            f"{config.where} is not a Hugging Face config.json: it has no field `architectures`\n"
            f"supported: {', '.join(sorted(known))}"
        )
    for architecture in named or [kinds[kind]]:
        if architecture in known:
            return known[architecture]
    near = [kinds[it] for it in get_close_matches(_kind(named[0]), kinds, 1, SIMILARITY)]
    inside = config.fields.get("text_config")
    raise UserError(
        f"{config.where}: architecture {', '.join(named)} is not supported"
        + (f": did you mean {near[0]}?" if near else "")
        + (f"\n{INNER_MODEL}" if isinstance(inside, dict) else "")
        + f"\nsupported: {', '.join(sorted(known))}"
    )


def _kind(architecture: str) -> str:
    """Return the model_type of an architecture without underscores: llama for LlamaForCausalLM."""
    return re.split("For|LMHead|WithLM|Model", architecture)[0].lower()


def fitting_readers(model: Model) -> Iterator[Reader]:
    """Yield the readers whose tensor names have a place for each weight of a model, first that of its name."""
    for it in _readers(model.name):
        try:
            checkpoint_tensors(it.names, model)
        except UserError:
            continue
        yield it


def _readers(model: str = "") -> Iterator[Reader]:
    for module in example_modules(model):
        yield from (it for it in vars(module).values() if isinstance(it, Reader))
