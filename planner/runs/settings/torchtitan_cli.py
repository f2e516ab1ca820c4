"""Options of torchtitan's command line as a tree of settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.dsl.quoting import shortened
from megaloom.planner.runs.settings.overrides import is_override, override_tree
from megaloom.planner.runs.settings.tree import Setting, Tree, overlaid, placed, plain_setting
from megaloom.planner.runs.words import Word

SUBCOMMAND = "activation_checkpoint:"


def option_tree(words: Sequence[Word]) -> Tree:
    """Return options as a tree: `--a.b value`, `--a.b=value`, `--a.b`, `a.b=value` and `activation_checkpoint:full`.

    A flag without a value is true. Raise UserError for a word that is none of these.
    """
    tree: Tree = {}
    for path, value in _pairs(words):
        tree = overlaid(tree, placed(path, value)) or {}
    return tree


def _pairs(words: Sequence[Word]) -> Iterator[tuple[str, Tree]]:
    """Yield the path of each option and its value; an empty path for a tree of them."""
    is_value = False
    for position, word in enumerate(words):
        plain = word.text.replace("-", "_")
        name, equals, value = word.text.partition("=")
        if is_value:
            is_value = False
        elif plain.startswith(SUBCOMMAND):
            yield "activation_checkpoint.mode", Setting(evolve(word, text=plain.removeprefix(SUBCOMMAND)))
        elif is_override(word) and not word.text.startswith("~"):
            yield "", override_tree([word])
        elif not name.startswith("--"):
            raise UserError(f"{word.origin}: {shortened(word.text, 40)} is no option of torchtitan with its value")
        elif equals:
            yield _path(name), _plain(evolve(word, text=value))
        else:
            after = words[position + 1] if position + 1 < len(words) else None
            is_value = after is not None and not after.text.startswith("--") and ":" not in after.text
            yield _path(name), _plain(after) if after and is_value else Setting(evolve(word, text="true"), "boolean")


def _path(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def _plain(word: Word) -> Setting:
    return evolve(plain_setting(word.text, word.origin), word=word)
