"""Parents of YAML files: Hydra's `defaults`, and `extends` of Primus."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import define, field

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.settings.near_names import first_origin
from megaloom.planner.runs.settings.tree import Setting, Tree, items_of_list, overlaid, placed
from megaloom.planner.runs.settings.yaml_tree import yaml_tree
from megaloom.planner.runs.shell.folders import MOST_BYTES
from megaloom.planner.runs.words import Unknown, Word

_DEEPEST = 20
_GROUP_WORDS = re.compile(r"^(optional |override )+")
_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)


@define
class ParentFiles:
    """Reads YAML files with their parents. `missing` gathers the parents that are not there."""

    folder: Path  # that of the file that was given
    overrides: dict[str, str] = field(factory=dict)  # group: name, from the command line and the files above
    missing: dict[Unknown, None] = field(factory=dict)

    def read(self, path: Path) -> str | None:
        """Return the text of a file, or None if it is not there."""
        try:
            if not path.is_file() or path.stat().st_size > MOST_BYTES:
                return None
            return path.read_bytes().decode(errors="replace")
        except OSError:
            return None

    def composed(self, text: str, path: str, depth: int = 0) -> Tree | None:
        """Return the settings of a text over those of its parents."""
        tree = yaml_tree(text, path)
        if depth > _DEEPEST:
            raise UserError(f"{path}: the parents of this file have no end")
        if not isinstance(tree, Mapping):
            return tree
        own: Tree = {k: v for k, v in tree.items() if k not in ("defaults", "extends", "includes", "bases")}
        parents = tree.get("defaults")
        if parents is not None:
            return self._with_defaults(own, parents, path, depth)
        result: Tree | None = None
        for key in ("extends", "includes", "bases"):
            for name in items_of_list(tree.get(key)):
                result = overlaid(result, self._file(Path(path).parent / name.text, name, "", depth))
        return overlaid(result, own)

    def _with_defaults(self, own: Tree, parents: Tree, path: str, depth: int) -> Tree | None:
        result: Tree | None = None
        placed_own = False
        entries = [parents] if isinstance(parents, Setting | Mapping) else parents
        for entry in entries:
            for group, names in entry.items() if isinstance(entry, Mapping) else ():
                if group.startswith("override ") and isinstance(names, Setting):
                    chosen = group.removeprefix("override ").partition("@")[0].strip("/ ")
                    self.overrides.setdefault(chosen, names.text)
        for entry in entries:
            if isinstance(entry, Setting) and entry.text == "_self_":
                result, placed_own = overlaid(result, own), True
            elif isinstance(entry, Setting):
                result = overlaid(result, self._file(Path(path).parent / entry.text, entry, "", depth))
            elif not isinstance(entry, Mapping):
                raise UserError(f"{first_origin(entry)}: a list in the list of parents is not read")
            for group, names in entry.items() if isinstance(entry, Mapping) else ():
                for name in items_of_list(names):
                    result = overlaid(result, self._group(group, name, path, depth))
        return result if placed_own else overlaid(result, own)

    def _group(self, group: str, name: Setting, path: str, depth: int) -> Tree | None:
        optional = group.startswith("optional ")
        group = group.removeprefix("optional ").strip()
        if group.startswith("override ") or name.kind == "null":
            return None
        group, _, package = group.partition("@")
        package = package.partition(":")[2] or package if ":" in package else package
        chosen = self.overrides.get(group.strip("/"), name.text)
        at = (self.folder if group.startswith("/") else Path(path).parent) / group.strip("/") / chosen
        return self._file(at, None if optional else name, package or group.strip("/").replace("/", "."), depth)

    def _file(self, at: Path, name: Setting | None, package: str, depth: int) -> Tree | None:
        for candidate in (at, at.with_name(at.name + ".yaml"), at.with_name(at.name + ".yml")):
            text = self.read(candidate)
            if text is not None:
                stated = _PACKAGE.search(text[:2000])
                if stated:
                    package = "" if stated[1] == "_global_" else stated[1]
                tree = self.composed(text, posixpath.normpath(str(candidate)), depth + 1)
                return placed(package, tree) if tree is not None else None
        if name is not None:
            shown = posixpath.normpath(str(at))
            origin = name.word.origin
            self.missing.setdefault(Unknown(shown if len(shown) < 200 else at.name, "file", origin))
        return None


def chosen_groups(text: str, path: str, words: Sequence[Word]) -> dict[str, str]:
    """Return the parents that words of a command line choose for groups of a file, as in `optim@model.optim=adam`.

    The keys are those of the words, before the equals sign.
    """
    tree = yaml_tree(text, path)
    entries = tree.get("defaults") if isinstance(tree, Mapping) else None
    groups = {
        _GROUP_WORDS.sub("", key).strip("/ ")
        for entry in (entries if isinstance(entries, Sequence) else ())
        for key in (entry if isinstance(entry, Mapping) else ())
    }
    pairs = (word.text.partition("=") for word in words)
    return {key: name for key, equals, name in pairs if equals and key.strip("/+") in groups}


def upward(start: Path, name: str) -> Path | None:
    """Return the nearest folder of this name beside the start or above it."""
    for folder in (start, *start.resolve().parents):
        if (folder / name).is_dir():
            return folder / name
    return None
