"""Settings as words of a command line, `a.b=value` (Hydra, Megatron-Bridge, verl), as a tree."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from attrs import evolve

from megaloom.planner.runs.settings.tree import Setting, Tree, overlaid, placed, plain_setting
from megaloom.planner.runs.words import Word

_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)


def override_tree(words: Sequence[Word]) -> Tree:
    """Return the tree of all words of the form KEY=VALUE; of two with the same key, the last counts."""
    tree: Tree = {}
    for word in words:
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
