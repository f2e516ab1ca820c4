"""Settings as words of a command line, `a.b=value` (Hydra, Megatron-Bridge, verl), as a tree."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.dsl.quoting import shortened
from megaloom.planner.runs.settings.tree import Setting, Tree, found, overlaid, placed, plain_setting
from megaloom.planner.runs.words import Word

_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)
_REMOVED = re.compile(r"~([A-Za-z_][\w./@-]*)")


def override_tree(words: Sequence[Word]) -> Tree:
    """Return the tree of all words of the form KEY=VALUE; of two with the same key, the last counts."""
    tree: Tree = {}
    for word in words:
        if removed := _REMOVED.fullmatch(word.text):
            tree = overlaid(tree, placed(removed[1].replace("/", "."), Setting(evolve(word, text=""), "null"))) or {}
        match = _OVERRIDE.fullmatch(word.text)
        if not match or word.text.startswith("-"):
            continue
        value = _unquoted(match[3])
        plain = plain_setting(value, word.origin)
        leaf: Tree = Setting(evolve(word, text=value), plain.kind)
        if match[1] == "~":
            leaf = Setting(evolve(word, text=""), "null")
        tree = overlaid(tree, placed(match[2].replace("/", "."), leaf)) or {}
    return tree


def unread_overrides(words: Sequence[Word]) -> tuple[Word, ...]:
    """Return the words that are no KEY=VALUE, and those that remove a key, which no reader asks for."""
    return tuple(word for word in words if word.text.strip() and (word.text[0] == "~" or not is_override(word)))


def is_override(word: Word) -> bool:
    """Return whether a word changes a setting: `a.b=1`, `+a.b=1`, `~a.b`."""
    return not word.text.startswith("-") and bool(_OVERRIDE.fullmatch(word.text) or _REMOVED.fullmatch(word.text))


def check_overrides(words: Sequence[Word], tree: Tree | None = None) -> None:
    """Raise UserError for a word of the user that changes no setting, or removes one that the tree does not have."""
    for word in words:
        removed = _REMOVED.match(word.text)
        if removed and found(tree, removed[1].replace("/", ".")) is None:
            raise UserError(f"after `--`: there is no {shortened(removed[1], 40)} to remove")
        if not is_override(word):
            shown = shortened(word.text, 40)
            raise UserError(f"after `--`: {shown} is no setting with its value\nwrite it as `-- train.seq_length=4096`")


def repeated_overrides(words: Sequence[Word]) -> tuple[Word, ...]:
    """Return the words KEY=VALUE whose key stands before with another value."""
    matches = ((word, _OVERRIDE.fullmatch(word.text)) for word in words if not word.text.startswith("-"))
    return repeated_names((evolve(word, text=match[2]), [_unquoted(match[3])]) for word, match in matches if match)


def repeated_names(given: Iterable[tuple[Word, Sequence[str]]]) -> tuple[Word, ...]:
    """Return the names that stand again with other values, of pairs of a name and its values."""
    last: dict[str, Sequence[str]] = {}
    repeated = []
    for name, values in given:
        if last.setdefault(name.text, values) != values:
            repeated.append(name)
        last[name.text] = values
    return tuple(repeated)


def _unquoted(text: str) -> str:
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if is_quoted else text
