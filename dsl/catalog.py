"""Finding a model by what a user types."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from inspect import isfunction, signature
from os.path import exists, isdir, isfile, join
from pathlib import Path
from traceback import extract_tb
from types import ModuleType

from megaloom.dsl.hf.architectures import (
    WANTED,
    config_file,
    read,
    title,
)

from .errors import UserError, short_path
from .graph import Model

EXAMPLES = "megaloom.examples"
LIKE = 8  # names of models that are shown in place of one that is not known, those most like it


def find(ref: str) -> tuple[Model, str]:
    """The model that `ref` names, and its full reference, from which any process finds it again.

    `ref` is `file.py:name`, a `file.py` with one model, `package.module:name`, the name of a model of the examples
    (`llama3-8b`), or a Hugging Face config.json (any .json, or a folder with one). A model is a `Model`, or a function
    without arguments that returns one; a file's only model is found without its name if it says `-> Model`. Raises
    UserError that says what would work.
    """
    if ref.endswith(".json") or (isfile(join(ref, "config.json")) and ref not in examples()):
        return read(ref), str(config_file(ref).resolve())
    place, _, name = ref.rpartition(":") if ":" in ref else (ref, "", "")
    if place.endswith(".py"):
        path = Path(place)
        if not isfile(place):
            raise UserError(f"no file {place!r}\n{WANTED}")
        return _pick(_load(path), str(path.resolve()), name)
    if name:
        return _pick(_import(place, ref), place, name)
    said = ref.lower().replace(".", "-").replace("_", "-")  # gpt3-1.3b is a model's own name
    for module in modules(said):
        for name in _models(module):
            if _shown(name) == said:
                return _pick(module, module.__name__, name)
    if exists(ref):
        what = "a folder without a config.json" if isdir(ref) else "no .py and no .json"
        raise UserError(f"{ref} is {what}\n{WANTED}")
    models = examples()
    near = get_close_matches(said, models, LIKE, 0.5)
    meant = f": did you mean {near[0]}?" if near else ""
    such = f"an example, such as {', '.join(near)}" if near else f"one of {', '.join(sorted(models))}"
    raise UserError(f"no model {ref!r}{meant}\nMODEL can be file.py:name, a config.json, or {such}")


def called(ref: str) -> str:
    """What a model of this full reference is called among files."""
    return title(Path(ref)) if ref.endswith(".json") else _shown(ref.rpartition(":")[2])


def examples() -> dict[str, str]:
    """The models that come with Megaloom: name → reference."""
    return {_shown(name): f"{m.__name__}:{name}" for m in modules() for name in _models(m)}


def modules(model: str = "") -> Iterator[ModuleType]:
    """The modules of the examples, each imported as it is asked for: first those that a model may be named after."""
    names = [info.name for info in pkgutil.iter_modules(importlib.import_module(EXAMPLES).__path__)]
    for name in sorted(names, key=lambda name: not model.startswith(_shown(name))):
        yield importlib.import_module(f"{EXAMPLES}.{name}")


def _shown(name: str) -> str:
    """A name of Python's as people write it."""
    return name.replace("_", "-")


def _models(module: ModuleType) -> dict[str, Model | Callable[[], Model]]:
    """The models that a module declares: `Model` values, and functions that need no argument and say `-> Model`."""
    return {
        name: it
        for name, it in vars(module).items()
        if not name.startswith("_")
        and (
            isinstance(it, Model)
            or (
                isfunction(it)
                and it.__module__ == module.__name__
                and it.__annotations__.get("return") in (Model, "Model")
                and not _needed(it)
            )
        )
    }


def _needed(function: Callable[..., object]) -> list[str]:
    """The arguments that a function cannot do without."""
    parameters = signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _pick(module: ModuleType, place: str, name: str) -> tuple[Model, str]:
    models = _models(module)
    if not name:
        if len(models) != 1:
            have = f"it has {', '.join(models)}" if models else "it has none (a function without arguments, `-> Model`)"
            raise UserError(f"{place} must have one model, or say which as {place}:name; {have}")
        (name,) = models
    made = getattr(module, name, None)
    if isfunction(made):
        if needed := _needed(made):
            raise UserError(
                f"{place}:{name} needs {', '.join(needed)}: a model's function has a default for each argument"
            )
        try:
            made = made()
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise _failed(f"{place}:{name} fails", error, module.__file__) from error
        if name in models and not isinstance(made, Model):
            raise UserError(f"{place}:{name} says `-> Model`, and returns {made!r:.40}")
    if not isinstance(made, Model):
        raise UserError(f"{place} has no model {name!r}; it has {', '.join(models) or 'none'}")
    return made, f"{place}:{name}"


def _import(place: str, ref: str) -> ModuleType:
    try:
        if not all(part.isidentifier() for part in place.split(".")):
            raise ImportError("that is no module's name")
        return importlib.import_module(place)
    except ImportError as error:
        raise UserError(f"cannot import {place!r} of {ref!r}: {error}\n{WANTED}") from error
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(f"cannot import {place!r} of {ref!r}", error) from error


def _failed(what: str, error: BaseException, file: str | None = None) -> UserError:
    """The error of a user's own code, with its last line (in `file`, if it got there)."""
    if isinstance(error, SyntaxError):
        at = (
            f"\n  at {short_path(f'{error.filename}:{error.lineno}')}" if error.filename else ""
        )  # null bytes have no line
        return UserError(f"{what}: SyntaxError: {error.msg}{at}")
    frames = extract_tb(error.__traceback__)
    last = ([f for f in frames if f.filename == file] or frames)[-1]
    at = f"{last.filename}:{last.lineno}"
    return UserError(f"{what}: {type(error).__name__}: {error}{_meant(error)}\n  at {short_path(at)}")


def _meant(error: BaseException) -> str:
    """For a name that is not known, that of the dsl which may be meant."""
    if not isinstance(error, NameError):
        return ""
    near = get_close_matches(error.name or "", importlib.import_module("megaloom.dsl").__all__, 1)
    return f": is {near[0]} of megaloom.dsl meant?" if near else ""


def _load(path: Path) -> ModuleType:
    """The module of a file, executed once a process."""
    name = f"megaloom_model_{abs(hash(path.resolve()))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except UserError:
        del sys.modules[name]
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _failed(f"cannot load {path}", error, module.__file__) from error
    return module
