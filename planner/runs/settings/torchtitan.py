"""torchtitan's TOML files: their keys are options of its command line, `--training.seq_len`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import evolve

from megaloom.planner.runs.settings.flag_words import SettingsRun
from megaloom.planner.runs.settings.tree import Setting, Tree, found, items_of_list, leaves
from megaloom.planner.runs.words import Word


def is_torchtitan(tree: Tree | None) -> bool:
    """Return True for settings with a model's flavor and a section `training`."""
    return isinstance(found(tree, "training"), Mapping) and found(tree, "model.flavor") is not None


def torchtitan_run(tree: Tree) -> SettingsRun:
    """Return the run of a torchtitan file."""
    return SettingsRun(framework="torchtitan", words=tuple(_words(tree)), program="torchtitan.train")


def _words(tree: Tree) -> Iterator[Word]:
    for path, value in leaves(tree):
        items = items_of_list(value)
        if not items:
            continue
        yield Word(f"--{path}", items[0].word.origin)
        yield (
            evolve(items[0].word, text=",".join(i.text for i in items))
            if not isinstance(value, Setting)
            else (value.word)
        )
