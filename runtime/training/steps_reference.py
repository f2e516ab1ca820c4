"""Steps of the user's own by reference, as in `--steps-from own.py:KeyTokens(alpha=0.25)`.

A run keeps the reference and a digest of the file, so that it continues and is evaluated with the same steps.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from hashlib import blake2b
from inspect import isclass, signature
from os.path import isfile, realpath
from pathlib import Path
from types import ModuleType

from attrs import frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.neighbours import neighbours_of
from megaloom.dsl.settings.reference import split_reference, with_arguments
from megaloom.dsl.user_modules import failure_of, module_of_file, module_of_name

from .run_folder import RunFile, file_of_run
from .run_options import RunOptions

STEP_NAMES = ("data_step", "training_step", "validation_step", "test_step")
DECLARED_STEPS = "none"
"""The reference of the steps of the declared objective."""
WANTED = "--steps-from can be file.py:Class or package.module:Class, with arguments as in 'file.py:Class(alpha=0.25)'"

_EXECUTED: dict[Path, str] = {}  # the digest of each file when this process has read it


@frozen
class StepsReference:
    """A class of steps and its arguments, by a reference that names them in every process of this machine."""

    ref: str  # of a file by its absolute path
    digest: str  # of the file

    @classmethod
    def of(cls, ref: str) -> StepsReference:
        """Return the full reference of what the user types. Raise UserError that says what would work."""
        path, arguments = split_reference(ref)
        location, _, name = path.rpartition(":") if ":" in path else (path, "", "")
        file = _file_of(location, ref)
        digest = _digest(file)
        location = realpath(location) if location.endswith(".py") else location
        name = name or _only_class(_module(location, ref), location)
        found = cls(with_arguments(f"{location}:{name}", arguments), digest)
        found.load()
        return found

    @property
    def file(self) -> Path:
        """The file of the class. Raise UserError if there is none."""
        return _file_of(split_reference(self.ref)[0].rpartition(":")[0], self.ref)

    def load(self) -> object:
        """Return a new object of the class. Raise UserError if the file has gone or changed, or its code fails."""
        path, arguments = split_reference(self.ref)
        location, _, name = path.rpartition(":")
        file = self.file
        if (now := _digest(file)) != self.digest:
            raise UserError(f"{file} has changed: its digest is {now}, not {self.digest}")
        module = _module(location, self.ref)
        if _EXECUTED.setdefault(file, self.digest) != self.digest:
            raise UserError(f"{file} has changed since this process has read it\nstart a new process")
        found = getattr(module, name, None)
        if not isclass(found):
            has = f"it has {', '.join(_classes(module))}" if list(_classes(module)) else WANTED
            raise UserError(f"{location} has no class {name!r}\n{has}")
        if not _has_step(found):
            raise UserError(f"{path} is a class without steps\nwrite any of {', '.join(STEP_NAMES)}")
        try:
            signature(found).bind(**arguments)
        except TypeError as error:
            raise UserError(f"{path}: {error}\n{WANTED}") from None
        try:
            with neighbours_of(str(file)):
                return found(**arguments)
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise failure_of(f"{self.ref} fails", error, str(file)) from error


def loaded_steps(steps: object) -> object:
    """Return steps as an object: those of a reference are made anew, others stay as they are."""
    return steps.load() if isinstance(steps, StepsReference) else steps


def steps_of_run(folder: Path, given: object, *, continues: bool = True) -> object:
    """Return the steps that a command asks for, or else those of the run in a folder: an object or a reference.

    given: an object, a reference as text, or None. continues: whether the run goes on; a new one has no steps before.
    Raise UserError for a reference that names no steps, and for a run whose steps have gone or changed.
    """
    if isinstance(given, str):
        return None if given == DECLARED_STEPS else StepsReference.of(given)
    file = file_of_run(folder) if continues else None
    if given is not None or file is None or file.options.start.steps_from is None:
        return given
    kept = StepsReference(file.options.start.steps_from, str(file.steps_digest))
    try:
        kept.load()
    except UserError as error:
        raise UserError(
            f"{folder} has the steps of {kept.ref}, but {str(error).partition(chr(10))[0]}\n"
            f"give --steps-from FILE.py:Class for the file as it is now, or --steps-from {DECLARED_STEPS} for the loss "
            "of the model"
        ) from None
    return kept


def with_steps(options: RunOptions, steps: object) -> RunFile:
    """Return the contents of run.json for a run with these options and steps. Of an object it has the class's name."""
    if isinstance(steps, StepsReference):
        return RunFile(options=options.changed(steps_from=steps.ref), steps_digest=steps.digest)
    name = None if steps is None else f"{type(steps).__module__}.{type(steps).__qualname__}"
    return RunFile(options=options.changed(steps_from=None), steps_object=name)


def steps_note(steps: object, file: RunFile | None) -> str:
    """Return a line on the steps of an evaluation; "" if the run has none. file: its run.json."""
    if steps is None and file and (name := file.steps_object):
        return (
            f"the run had steps of {name}, which it does not keep, since they were given as an object: this is the "
            "loss of the model; give --steps-from FILE.py:Class"
        )
    return f"steps of {steps.ref}" if isinstance(steps, StepsReference) else ""


def _file_of(location: str, ref: str) -> Path:
    """Return the file of a module. Raise UserError if there is none."""
    if location.endswith(".py"):
        if not isfile(location):
            raise UserError(f"there is no file {location}\n{WANTED}")
        return Path(location)
    try:
        spec = importlib.util.find_spec(location) if location else None
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not isfile(spec.origin):
        raise UserError(f"there is no module {location!r}, of {ref!r}\n{WANTED}")
    return Path(spec.origin)


def _digest(file: Path) -> str:
    try:
        return blake2b(file.read_bytes(), digest_size=6).hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None


def _module(location: str, ref: str) -> ModuleType:
    return module_of_file(Path(location)) if location.endswith(".py") else module_of_name(location, ref, WANTED)


def _only_class(module: ModuleType, location: str) -> str:
    """Return the name of the only class of a module that has a step. Raise UserError if there are none or several."""
    names = list(_classes(module))
    if len(names) != 1:
        has = (
            f"has several classes with steps: name one as {location}:{names[0]}" if names else "has no class with steps"
        )
        more = f"; it has {', '.join(names)}" if names else f"\nwrite one with any of {', '.join(STEP_NAMES)}"
        raise UserError(f"{location} {has}{more}")
    return names[0]


def _classes(module: ModuleType) -> Iterator[str]:
    for name, it in vars(module).items():
        if isclass(it) and it.__module__ == module.__name__ and not name.startswith("_") and _has_step(it):
            yield name


def _has_step(it: type) -> bool:
    return any(callable(getattr(it, name, None)) for name in STEP_NAMES)
