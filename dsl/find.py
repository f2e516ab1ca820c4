"""Finding a model by what a user types."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType

from .errors import UserError
from .graph import Model

EXAMPLES = "megaloom.examples"


def find(ref: str) -> tuple[Model, str]:
    """The model that `ref` names, and its full reference, from which any process finds it again.

    `ref` is `file.py:name`, a `file.py` with one model, `package.module:name`, or the name of a model of
    the examples (`llama3-8b`). A model is a `Model`, or a function without arguments that returns one.
    Raises UserError that says what would work.
    """
    place, _, name = ref.rpartition(":") if ":" in ref else (ref, "", "")
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise UserError(f"no file {place!r}\n{_known()}")
        return _pick(_load(path), str(path.resolve()), name)
    if name:
        try:
            module = importlib.import_module(place)
        except ImportError as error:
            raise UserError(f"cannot import {place!r} of {ref!r}: {error}\n{_known()}") from None
        return _pick(module, place, name)
    models = examples()
    if ref not in models:
        near = get_close_matches(ref, models, 1, 0.5)
        raise UserError(f"no model {ref!r}" + (f": did you mean {near[0]}?" if near else "") + f"\n{_known()}")
    place, _, name = models[ref].partition(":")
    return _pick(importlib.import_module(place), place, name)


def examples() -> dict[str, str]:
    """The models that come with Megaloom: name → reference."""
    package = importlib.import_module(EXAMPLES)
    found = {}
    for info in pkgutil.iter_modules(package.__path__, EXAMPLES + "."):
        module = importlib.import_module(info.name)
        found.update({name.replace("_", "-"): f"{info.name}:{name}" for name in _models(module)})
    return found


def _known() -> str:
    return f"MODEL can be file.py:name, or one of {', '.join(sorted(examples()))}"


def _models(module: ModuleType) -> dict[str, Model | Callable[[], Model]]:
    """The models that a module declares: `Model` values, and functions that need no argument and say `-> Model`."""
    out: dict[str, Model | Callable[[], Model]] = {}
    for name, it in vars(module).items():
        if name.startswith("_"):
            continue
        code = getattr(it, "__code__", None)
        if isinstance(it, Model):
            out[name] = it
        elif code and it.__module__ == module.__name__ and it.__annotations__.get("return") in (Model, "Model"):
            required = code.co_argcount - len(it.__defaults__ or ())
            required += code.co_kwonlyargcount - len(it.__kwdefaults__ or {})
            if not required:
                out[name] = it
    return out


def _pick(module: ModuleType, place: str, name: str) -> tuple[Model, str]:
    models = _models(module)
    if not name:
        if len(models) != 1:
            have = f"it has {', '.join(models)}" if models else "it has none (a function without arguments, `-> Model`)"
            raise UserError(f"{place} must have one model, or say which as {place}:name; {have}")
        (name,) = models
    it = models.get(name, getattr(module, name, None))
    made = it() if callable(it) and name in models else it
    if not isinstance(made, Model):
        raise UserError(f"{place} has no model {name!r}; it has {', '.join(models) or 'none'}")
    return made, f"{place}:{name}"


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
    except Exception as error:
        del sys.modules[name]
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise UserError(f"cannot load {path}{where}: {type(error).__name__}: {error}") from error
    return module
