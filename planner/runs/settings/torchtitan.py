"""torchtitan's TOML files: their keys are options of its command line, `--training.seq_len`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.dsl.quoting import shortened
from megaloom.planner.runs.settings.flag_words import SettingsRun
from megaloom.planner.runs.settings.near_names import first_origin
from megaloom.planner.runs.settings.torchtitan_judged import READ_OPTIONS, SILENT_OPTIONS
from megaloom.planner.runs.settings.tree import Setting, Tree, found, items_of_list, leaves
from megaloom.planner.runs.settings.unread import unread_settings
from megaloom.planner.runs.words import Word

NULL_MATTERS = frozenset({"parallelism.context_parallel_load_balancer", "activation_checkpoint.mode"})
"""Options for which none is another value than the default."""


def is_torchtitan(tree: Tree | None) -> bool:
    """Return True for settings with a model's flavor and a section `training`."""
    return isinstance(found(tree, "training"), Mapping) and found(tree, "model.flavor") is not None


def torchtitan_run(tree: Tree) -> SettingsRun:
    """Return the run of a torchtitan file. Raise UserError for lists of mappings, which no option is."""
    for path in READ_OPTIONS:
        if isinstance(value := found(tree, path), Mapping) and path != "quantize.linear.float8":
            raise UserError(f"{first_origin(value)}: {path} of torchtitan is a value, got a mapping")
    return SettingsRun(
        framework="torchtitan",
        words=tuple(_words(tree)),
        program="torchtitan.train",
        left_out=tuple(unread_settings(tree, READ_OPTIONS, SILENT_OPTIONS)),
    )


def _words(tree: Tree) -> Iterator[Word]:
    for path, value in leaves(tree):
        if isinstance(value, Setting):
            if value.kind != "null" or path in NULL_MATTERS:
                yield Word(f"--{path}", value.word.origin)
                yield value.word
        elif any(isinstance(item, Mapping) for item in (value, *value)):
            raise UserError(f"{first_origin(value)}: {shortened(path, 60)} is a list of mappings, which is not read")
        elif joined := _joined(value):
            yield Word(f"--{path}", joined.origin)
            yield joined


def _joined(value: Tree) -> Word | None:
    """Return the items of a list as one word with commas between them, and lists in a list with bars between them."""
    if isinstance(value, Setting):
        return value.word
    lists = [one for one in value if not isinstance(one, Setting)] if not isinstance(value, Mapping) else []
    words = [word for one in lists if (word := _joined(one))] or [one.word for one in items_of_list(value)]
    return evolve(words[0], text=("|" if lists else ",").join(word.text for word in words)) if words else None
