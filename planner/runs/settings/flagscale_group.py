"""FlagScale: the experiment that a file of the group `train` is run with, which stands in the folder above it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from attrs import frozen

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.settings.parents import ParentFiles
from megaloom.planner.runs.settings.tree import Setting, Tree, found, overlaid, placed
from megaloom.planner.runs.settings.yaml_tree import yaml_tree


@frozen
class Experiment:
    """An experiment with a file of its group, and its path; the file alone and no path where there is no experiment."""

    tree: Tree
    path: str = ""


def with_experiment(tree: Tree, path: str) -> Experiment:
    """Return a group's settings in the experiment beside it, as `train=NAME` on FlagScale's command line sets it.

    Of several experiments the one counts that chooses this file, then the one that has the group's name.
    """
    at = Path(path)
    group, name = at.absolute().parent.name, at.stem
    if found(tree, "experiment") is not None or found(tree, "train") is not None:
        return Experiment(tree)
    files = sorted(_experiments(at.absolute().parent.parent, group))
    chosen = [one for one, stem in files if stem == name] or [one for one, _ in files]
    usual = [one for one in chosen if one.stem == group]
    if not chosen or (len(chosen) > 1 and not usual):
        return Experiment(tree)
    experiment = usual[0] if usual else chosen[0]
    parents = ParentFiles(experiment.parent, {group: name})
    text = parents.read(experiment) or ""
    whole = overlaid(parents.composed(text, str(experiment)), placed(group, tree))
    assert whole is not None
    return Experiment(whole, str(at.parent.parent / experiment.name))


def _experiments(folder: Path, group: str) -> Iterator[tuple[Path, str]]:
    """Yield the files of a folder with a parent of a group, and the name of that parent."""
    for path in folder.glob("*.yaml"):
        text = ParentFiles(folder).read(path)
        try:
            tree = yaml_tree(text, str(path)) if text else None
        except UserError:
            continue
        entries = found(tree, "defaults")
        for entry in entries if not isinstance(entries, Mapping | Setting | None) else ():
            if isinstance(name := found(entry, group), Setting) and found(tree, "experiment") is not None:
                yield path, name.text
