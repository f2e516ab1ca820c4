"""The training command that is read, of the several that a script may start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import PurePath

from attrs import evolve, frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.quoting import printable, shortened

from .launch import MARKS, Launch, launched_devices, trains_gpt
from .run import Note
from .words import Script, Unknown, Word

DEGREES = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--expert-model-parallel-size",
    "--global-batch-size",
    "--train-iters",
)
STARTERS = frozenset({"setup_experiment.py"})
"""Programs of Megatron-Bridge's scripts/performance, which find the recipe by words of their own."""
SHOWN_FLAGS = 4  # flags that a command is told apart by
SHOWN_COMMANDS = 20


@frozen
class ChosenLaunch:
    """The training command that is read, and what was assumed to choose it."""

    launch: Launch
    assumed: tuple[Note, ...] = ()


def chosen_launch(launches: Sequence[Launch], command: str | None, path: str) -> ChosenLaunch:
    """Return the training command with this number, counted from 1; without a number the only one.

    Commands with the same words count once, and those that train no GPT are left out where another one does. Raise
    UserError that lists the commands if there are several.
    """
    different = list({_signature(launch): launch for launch in reversed(launches)}.values())[::-1]
    candidates = [launch for launch in different if trains_gpt(launch.program)] or different[:1]
    number = int(command) if command is not None and command.isdecimal() else None
    if command is not None:
        if number is None or not 1 <= number <= len(candidates):
            what = f"--command must be from 1 to {len(candidates)}, got {command!r:.40}"
            raise UserError(f"{what}\n{_listed(candidates)}")
    elif len(candidates) > 1:
        raise UserError(
            f"{printable(path)} starts {len(candidates)} training commands\ngive the one to read: --command 1\n"
            f"{_listed(candidates)}"
        )
    launch = candidates[(number or 1) - 1]
    spelled, assumed = _spelled(launch), []
    if len(candidates) > 1:
        assumed.append(f"training command {number} of {len(candidates)} (`--command`)")
    if spelled is not launch:
        assumed.append("flags with underscores are Megatron-LM's with dashes")
    return ChosenLaunch(spelled, tuple(Note(text, launch.program.origin) for text in assumed))


def _signature(launch: Launch) -> tuple[object, ...]:
    """Return what two launches of the same run share; the rank of a machine and its address are not in it."""
    machines = launched_devices(launch, {})
    return (
        launch.program.text,
        tuple((word.text, word.unknown) for word in launch.words),
        (machines.count, machines.per_machine) if machines else None,
    )


def _spelled(launch: Launch) -> Launch:
    """Return the launch with dashes in the names of its flags, if all flags of its model have underscores."""
    names = {word.text.partition("=")[0] for word in launch.words}
    if names & MARKS:
        return launch
    return evolve(launch, words=tuple(map(_with_dashes, launch.words)))


def _with_dashes(word: Word) -> Word:
    name, equals, value = word.text.partition("=")
    return evolve(word, text=name.replace("_", "-") + equals + value) if name.startswith("--") else word


def _listed(candidates: Sequence[Launch]) -> str:
    values = [_values(launch) for launch in candidates]
    flags = dict.fromkeys((*DEGREES, *sorted(MARKS)))
    apart = [flag for flag in flags if len({each.get(flag, "") for each in values}) > 1]
    lines = []
    for number, (launch, each) in enumerate(zip(candidates, values, strict=True), 1):
        stated = " ".join(islice((f"{flag} {each[flag]}" for flag in apart if flag in each), SHOWN_FLAGS))
        name = shortened(PurePath(launch.program.text).name, 40)
        lines.append(f"  {number}: line {launch.program.origin.line_number}, {printable(name)} {stated}".rstrip())
    return "\n".join(lines[:SHOWN_COMMANDS])


def _values(launch: Launch) -> Mapping[str, str]:
    """Return the numbers after flags that tell commands apart; other words are not shown."""
    found = {}
    for flag, value in zip(launch.words, launch.words[1:], strict=False):
        name = flag.text.replace("_", "-")
        if (name in DEGREES or name in MARKS) and not value.unknown and value.text.isdecimal():
            found[name] = value.text
    return found


def no_launch(script: Script, path: str) -> UserError:
    """Return the error for a script that starts no training of Megatron-LM, with what is not known of it."""
    causes = dict.fromkeys((*_undecided(script), *script.unknown))
    for command in script.commands:
        for word in command.words:
            if PurePath(word.text).name in STARTERS:
                what = f"{word.origin}: {PurePath(word.text).name} trains a recipe of Megatron-Bridge"
                return UserError(f"{what}\nread the file of the recipe, with its changes after `--`")
    names = [cause.name for cause in causes if cause.kind == "variable" and cause.name.isidentifier()]
    unknown = ", ".join(f"{one.kind} {printable(one.name)}" for one in causes)
    hint = f"\nnot known: {unknown}" if unknown else ""
    if names:
        hint += f"\ngive {' '.join(f'--env {name}=…' for name in names)} (nothing after = for an empty one)"
    elif script.left and not unknown:
        hint = f"\nthe script stops at {script.left}: exit"
    elif script.defined and not unknown and not script.commands:
        hint = f"\nit only sets {' and '.join(script.defined[:SHOWN_FLAGS])}: give the script that sources it"
    return UserError(f"{printable(path)} starts no training of Megatron-LM that could be found{hint}")


def _undecided(script: Script) -> Iterator[Unknown]:
    """Yield what commands depend on that start a training under one outcome of a condition."""
    for command in script.commands:
        for word in command.words:
            for outcome in word.either:
                texts = {one.text for one in outcome}
                if any(text.endswith(".py") for text in texts) or len(MARKS & texts) > 1:
                    yield from word.unknown
                    break
