"""Primus: `modules`, each with a framework, parents of its own and `overrides` by Megatron-LM's destinations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.settings.flag_words import SettingsRun, flag_words
from megaloom.planner.runs.settings.interpolation import Interpolation
from megaloom.planner.runs.settings.near_names import near_names
from megaloom.planner.runs.settings.parents import ParentFiles, upward
from megaloom.planner.runs.settings.tree import Setting, Tree, found, overlaid, setting_at
from megaloom.planner.runs.words import Unknown, Word

_CONFIGS = "primus/configs"
_NOT_FLAGS = frozenset({"includes", "trainable", "sink_level", "file_sink_level", "stderr_sink_level", "model_type"})


def is_primus(tree: Tree | None) -> bool:
    """Return True for settings with modules that name their framework."""
    modules = found(tree, "modules")
    return isinstance(modules, Mapping) and any(found(m, "framework") for m in modules.values())


def primus_run(tree: Tree, path: str, environment: Mapping[str, str], is_flag: Callable[[str], bool]) -> SettingsRun:
    """Return the run of a Primus file. Keys of its parents that are no flags of Megatron-LM keep Primus's defaults."""
    inserted = Interpolation(tree, environment)
    resolved = inserted.resolved(tree)
    name, module = next(iter(_trainers(resolved)), ("", None))
    framework = setting_at(module, "framework")
    if framework is None or framework.text != "megatron":
        kind = framework.text if framework else "no framework"
        raise UserError(f"{path} is a Primus file for {kind}, of which only those for megatron are read")
    parents = ParentFiles(Path(path).parent)
    base: Tree | None = None
    for folder, key in (("modules", "config"), ("models", "model")):
        base = overlaid(base, _parent(parents, folder, setting_at(module, key), environment))
    own = found(module, "overrides")
    both = overlaid(base, own)
    near = near_names(module, ("framework", "config", "model", "overrides"))
    words = (*near, *_words(both if isinstance(both, Mapping) else {}, own, is_flag))
    unknown = (*parents.missing,)
    return SettingsRun(framework=f"Primus ({name})", words=words, unknown=unknown, assumed=tuple(inserted.assumed))


def override_path(tree: Tree | None) -> str:
    """Return the path of the first module's own settings, which options of a command line change."""
    return next((f"modules.{name}.overrides" for name, _ in _trainers(tree)), "")


def _trainers(tree: Tree | None) -> Iterator[tuple[str, Tree]]:
    modules = found(tree, "modules")
    if isinstance(modules, Mapping):
        yield from ((name, module) for name, module in modules.items() if found(module, "framework"))


def _parent(parents: ParentFiles, folder: str, name: Setting | None, environment: Mapping[str, str]) -> Tree | None:
    if name is None:
        return None
    root = upward(parents.folder, _CONFIGS)
    at = root / folder / "megatron" / name.text if root else None
    text = parents.read(at) if at else None
    if at is None or text is None:
        parents.missing.setdefault(Unknown(f"{_CONFIGS}/{folder}/megatron/{name.text}", "file", name.word.origin))
        return None
    tree = parents.composed(text, str(at))
    return Interpolation(tree, environment).resolved(tree)


def _words(tree: Mapping[str, Tree], own: Tree | None, is_flag: Callable[[str], bool]) -> Iterator[Word]:
    for key, value in tree.items():
        if isinstance(value, Mapping) or key in _NOT_FLAGS:
            continue
        words = list(flag_words(key, value))
        if words and (is_flag(words[0].text) or found(own, key) is not None):
            yield from words
