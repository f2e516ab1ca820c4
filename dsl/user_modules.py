"""Modules of the user's own, from a file or by name, and the errors of their code in words."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from difflib import get_close_matches
from os.path import realpath
from pathlib import Path
from traceback import extract_tb
from types import ModuleType

from .errors import UserError, short_path
from .neighbours import neighbours_of


def module_of_file(path: Path) -> ModuleType:
    """Return the module of a file, executed once per process. Raise UserError if its code fails."""
    name = f"megaloom_model_{abs(hash(realpath(path)))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with neighbours_of(str(path)):
            spec.loader.exec_module(module)
    except (UserError, KeyboardInterrupt):
        sys.modules.pop(name, None)
        raise
    except BaseException as error:
        sys.modules.pop(name, None)
        raise failure_of(f"cannot load {path}", error, module.__file__) from error
    return module


def module_of_name(name: str, ref: str, wanted: str) -> ModuleType:
    """Return an imported module. Raise UserError if there is none, or its code fails.

    ref, wanted: for the error, the reference that names the module, and the references that would work.
    """
    try:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ImportError("this is not the name of a module")
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"cannot import {name!r} of {ref!r}: {error}\n{wanted}") from error
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise failure_of(f"cannot import {name!r} of {ref!r}", error) from error


def failure_of(what: str, error: BaseException, file: str | None = None) -> UserError:
    """Return the error for an exception in the user's code: it names its last line, in `file` if there is one."""
    if isinstance(error, SyntaxError):
        at = (
            f"\n  at {short_path(f'{error.filename}:{error.lineno}')}" if error.filename else ""
        )  # null bytes have no line
        return UserError(f"{what}: SyntaxError: {error.msg}{at}")
    frames = extract_tb(error.__traceback__)
    last = ([f for f in frames if f.filename == file] or frames)[-1]
    at = f"{last.filename}:{last.lineno}"
    try:
        text = f": {error}"
    except Exception:  # of the user's own __str__
        text = ""
    return UserError(f"{what}: {type(error).__name__}{text}{_suggestion(error)}\n  at {short_path(at)}")


def _suggestion(error: BaseException) -> str:
    """Return a hint for a NameError that a name of megaloom.dsl resembles."""
    if not isinstance(error, NameError):
        return ""
    near = get_close_matches(error.name or "", importlib.import_module("megaloom.dsl").__all__, 1)
    return f": did you mean {near[0]} of megaloom.dsl?" if near else ""
