"""Settings of a file as a tree: mappings, lists, and values that know the line where they stand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from attrs import frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.quoting import shortened
from megaloom.planner.runs.words import Origin, Unknown, Word

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0", "null", "~", "none", "")
ValueKind = Literal["boolean", "null", "number", "text"]


@frozen
class Setting:
    """A value: its text, the line where it stands, and its kind in the file's format."""

    word: Word
    kind: ValueKind = "text"

    @property
    def text(self) -> str:
        """The text of the value."""
        return self.word.text

    @property
    def is_true(self) -> bool:
        """True for a boolean that is true, and for text that says so. Raise UserError for what is neither."""
        if self.word.unknown:
            causes = " and ".join(f"{one.kind} {one.name}" for one in self.word.unknown)
            raise UserError(f"{self.word.origin}: a switch depends on {causes}, which is not known")
        text = self.word.text.lower()
        if text not in (*_TRUE, *_FALSE):
            raise UserError(f"{self.word.origin}: a switch must be true or false, got {shortened(text, 20)}")
        return text in _TRUE


Tree = Mapping[str, "Tree"] | Sequence["Tree"] | Setting
"""A mapping, a list or a value."""


def overlaid(below: Tree | None, above: Tree | None) -> Tree | None:
    """Return two trees as one: mappings are joined key by key; elsewhere the one above counts."""
    if above is None:
        return below
    if isinstance(below, Mapping) and isinstance(above, Mapping):
        joined = {key: overlaid(below.get(key), above.get(key)) for key in {**below, **above}}
        return {key: value for key, value in joined.items() if value is not None}
    return above


def found(tree: Tree | None, path: str) -> Tree | None:
    """Return what stands at a path such as `model.optim.lr`, or None."""
    for key in filter(None, path.split(".")):
        if isinstance(tree, Mapping):
            tree = tree.get(key)
        elif isinstance(tree, Sequence) and key.isdecimal() and int(key) < len(tree):
            tree = tree[int(key)]
        else:
            return None
    return tree


def is_null(tree: Tree) -> bool:
    """Return whether a tree is the value null."""
    return isinstance(tree, Setting) and tree.kind == "null"


def setting_at(tree: Tree | None, path: str) -> Setting | None:
    """Return the value at a path; None if there is none, or if it is null."""
    at = found(tree, path)
    return at if isinstance(at, Setting) and not is_null(at) else None


def placed(path: str, tree: Tree) -> Tree:
    """Return the tree under a path of keys."""
    for key in reversed([k for k in path.split(".") if k]):
        tree = {key: tree}
    return tree


def leaves(tree: Tree | None, prefix: str = "") -> Iterator[tuple[str, Setting | Sequence[Tree]]]:
    """Yield each value and each list with its path."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else key)
    elif tree is not None:
        yield prefix, tree


def items_of_list(tree: Tree | None) -> list[Setting]:
    """Return the values of a list; one value is a list of itself."""
    if isinstance(tree, Setting):
        return [] if tree.kind == "null" else [tree]
    if isinstance(tree, Mapping) or tree is None:
        return []
    return [item for item in tree if isinstance(item, Setting)]


def plain_setting(text: str, origin: Origin) -> Setting:
    """Return a value that is written as plain text: its kind is that of YAML."""
    kind: ValueKind = "text"
    if text.lower() in ("true", "false"):
        kind = "boolean"
    elif text.lower() in ("null", "~", "none"):
        kind = "null"
    elif text.replace(".", "", 1).replace("-", "", 1).isdecimal():
        kind = "number"
    return Setting(Word(text, origin), kind)


def not_known(unknown: Unknown) -> Setting:
    """Return a value of which nothing is known."""
    return Setting(Word("", unknown.origin, (unknown,)))
