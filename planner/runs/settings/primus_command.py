"""Commands that start Primus: its settings file, and the options that count more than the file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from attrs import evolve, frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.quoting import shortened
from megaloom.planner.runs.words import Command, Word

FROM_ENVIRONMENT = "EXP"
LEAST_OPTIONS = 2  # options with underscores that tell a command of Primus from others that see EXP


@frozen
class PrimusCommand:
    """The settings file that a command names, and its options as KEY=VALUE."""

    config: Word
    overrides: tuple[Word, ...]


def primus_command(command: Command) -> PrimusCommand | None:
    """Return what a command gives Primus: `train pretrain --config FILE`, or options beside the variable EXP."""
    words = command.words
    for position, (name, value) in enumerate(pairwise(words)):
        if name.text == "--config" and _is_file(value) and any(w.text == "pretrain" for w in words[:position]):
            return PrimusCommand(value, tuple(_overrides(words[position + 2 :])))
    config = command.environment.get(FROM_ENVIRONMENT)
    if config is None or not _is_file(config):
        return None
    start = next((n for n, word in enumerate(words) if word.text.endswith((".sh", ".py"))), len(words))
    overrides = tuple(_overrides(words[start + 1 :]))
    return PrimusCommand(config, overrides) if sum("_" in one.text for one in overrides) >= LEAST_OPTIONS else None


def near_file(name: str, script: str) -> str | None:
    """Return the path of a file that a script names: seen from the working folder, its folder, or one above it."""
    at = Path(name)
    folders = [Path(), *Path(script).absolute().parents]
    return next((str(folder / at) for folder in folders if (folder / at).is_file()), None)


def _is_file(word: Word) -> bool:
    return word.text.endswith((".yaml", ".yml")) and not word.unknown


def _overrides(words: Sequence[Word]) -> Iterator[Word]:
    """Yield `--key value` and `--key=value` as KEY=VALUE; an option without a value is one that is set.

    Raise UserError for another word, which Primus takes for none of its settings.
    """
    is_value = False
    for position, word in enumerate(words):
        name, equals, value = word.text.partition("=")
        if is_value or not word.text:
            is_value = False
            continue
        if not name.startswith("--") or not name[2:].replace("_", "").replace(".", "").isalnum():
            raise UserError(f"{word.origin}: {shortened(word.text, 40)} is no option of Primus with its value")
        after = words[position + 1] if position + 1 < len(words) else None
        is_value = not equals and after is not None and not after.text.startswith("--")
        if equals:
            yield evolve(word, text=f"{name[2:]}={value}")
        elif after is None or after.text.startswith("--"):
            yield evolve(word, text=f"{name[2:]}=true")
        else:
            yield evolve(after, text=f"{name[2:]}={after.text}")
