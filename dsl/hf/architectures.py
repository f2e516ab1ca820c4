"""Models as Hugging Face describes them: a config.json becomes a Model.

Protocol: an example marks the function that makes its models from a `Config` with `@reads(...)`, by the architectures
that it reads, and gives the names of their weights beside it. What is found so is looked up here; nothing is listed
twice. Fields are strict: see `config`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from os.path import isdir
from pathlib import Path
from typing import Any

from attrs import frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Model

from .fields import Config, rope, rotation
from .tensor_names import Names

NEAR = 0.7  # how like a known kind an unknown one is, for the known one to be meant
WANTED = "MODEL can be file.py:name, a Hugging Face config.json, or the name of an example, such as llama3-8b"
INSIDE = "the language model in it can be planned alone: make its text_config a config.json of its own"

__all__ = [
    "Config",
    "Reader",
    "config_file",
    "describes",
    "opened",
    "read",
    "reader",
    "reads",
    "rope",
    "rotation",
    "title",
]


@frozen
class Reader:
    """What reads the config.json of some architectures, and what their checkpoints call the weights."""

    architectures: tuple[str, ...]
    model: Callable[[Config, str], Model]
    names: Names

    def __call__(self, config: Config, name: str) -> Model:
        """The model of this name. Raises UserError when a field is missing, wrong, or was not taken into account."""
        made = self.model(config, name)
        if unread := list(config.unread()):
            raise UserError(
                f"{config.where}: nothing here is known of {', '.join(unread)}\n"
                f"{self.architectures[0]} is read without; remove what does not change the model"
            )
        return made


def reads(*architectures: str, names: Names) -> Callable[[Callable[[Config, str], Model]], Reader]:
    """Marks the function that makes a model from the config.json of these architectures."""
    return lambda function: Reader(architectures, function, names)


def read(config: str | Path | Mapping[str, Any]) -> Model:
    """The model that a Hugging Face config.json describes: of a file, a folder that has one, or its fields.

    It is called as the file or, if that is a config.json, its folder. Raises UserError for an architecture or a field
    that is not known, and for one that is missing.
    """
    made, name = opened(config)
    return reader(made)(made, name)


def opened(config: str | Path | Mapping[str, Any]) -> tuple[Config, str]:
    """The fields of a config.json, and what a model of it is called."""
    if isinstance(config, Mapping):
        said = config.get("_name_or_path") or config.get("model_type") or "model"
        return Config(config, "config"), Path(str(said)).name
    path = config_file(config)
    try:
        fields = json.loads(path.read_text(encoding="utf-8"), object_hook=_number)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}\n{WANTED}") from error
    if not isinstance(fields, dict):
        raise UserError(f"{path} is no config.json: it must hold an object with fields")
    return Config(fields, str(path)), title(path)


def _number(fields: dict[str, Any]) -> Any:
    """A number that JSON has no word for, as Hugging Face writes it: {"__float__": "Infinity"}."""
    number = fields.get("__float__")
    return float(number) if len(fields) == 1 and isinstance(number, str) else fields


def title(path: Path) -> str:
    """What a model of this file is called: as the file or, if that is a config.json, as its folder."""
    return path.resolve().parent.name if path.name == "config.json" else path.stem


def describes(path: str | Path) -> bool:
    """Whether a file is a config.json rather than any other JSON, a plan.json above all."""
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(fields, dict) and not fields.keys().isdisjoint(("architectures", "model_type"))


def config_file(config: str | Path) -> Path:
    """The file itself, or the config.json of a folder."""
    path = Path(config)
    return path / "config.json" if isdir(path) else path


def reader(config: Config) -> Reader:
    """What reads this config.json, by its architecture. Raises UserError when none does."""
    known = {a: r for r in _readers() for a in r.architectures}
    said = [str(a) for a in config.many("architectures", [])]
    kinds = {_kind(a): a for a in reversed(known)}  # of a kind the first
    kind = config.text("model_type", "").removesuffix("_text").replace("_", "")
    if "stages" in config.fields and not said:
        raise UserError(f"{config.where} is a plan, not a model\n`megaloom explain {config.where}` shows it")
    if not said and kind not in kinds:
        raise UserError(f"{config.where} names no architectures\nthey can be {', '.join(sorted(known))}")
    for architecture in said or [kinds[kind]]:
        if architecture in known:
            return known[architecture]
    near = [kinds[it] for it in get_close_matches(_kind(said[0]), kinds, 1, NEAR)]
    inside = config.fields.get("text_config")
    raise UserError(
        f"{config.where}: nothing reads the architecture {', '.join(said)}"
        + (f": is {near[0]} meant?" if near else "")
        + (f"\n{INSIDE}" if isinstance(inside, dict) else "")
        + f"\nknown are {', '.join(sorted(known))}"
    )


def _kind(architecture: str) -> str:
    """The model_type of an architecture, without what stands between its words: LlamaForCausalLM is a llama."""
    return re.split("For|LMHead|WithLM|Model", architecture)[0].lower()


def _readers() -> Iterator[Reader]:
    from megaloom.dsl.catalog import modules  # which finds what is read here

    for module in modules():
        yield from (it for it in vars(module).values() if isinstance(it, Reader))
