"""Primus: `modules`, each with a framework, parents of its own and `overrides` by Megatron-LM's destinations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.settings.flag_words import SettingsRun, flag_words, is_other_spelling
from megaloom.planner.runs.settings.interpolation import Interpolation
from megaloom.planner.runs.settings.near_names import near_names, unknown_setting
from megaloom.planner.runs.settings.parents import ParentFiles, upward
from megaloom.planner.runs.settings.tree import Setting, Tree, found, is_null, overlaid, setting_at
from megaloom.planner.runs.settings.unread import misshapen_settings, unread_settings
from megaloom.planner.runs.words import Unknown, Word

_CONFIGS = "primus/configs"
_NOT_FLAGS = frozenset({"includes", "trainable", "sink_level", "file_sink_level", "stderr_sink_level", "model_type"})
_SILENT = ("work_group", "user_name", "exp_name", "workspace")
_OF_MODULE = ("framework", "config", "model", "overrides")
_WITHOUT_EFFECT = frozenset(
    {
        *("disable_primus_topk_router", "use_deprecated_20241209_moe_layer", "deprecated_use_mcore_models"),
        *("conv_L_cache", "original_max_position_embeddings", "mamba_expand", "mamba_d_conv"),
    }
)
"""Keys of Primus's models that are no flags of Megatron-LM, and change no model without others that are refused."""


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
    trainer, model = (
        _parent(parents, folder, setting_at(module, key), environment)
        for folder, key in (("modules", "config"), ("models", "model"))
    )
    own = found(module, "overrides")
    both = overlaid({**_mapping(model), **_mapping(trainer)}, own)  # a key of both is the trainer's, and is not joined
    near = (*near_names(module, _OF_MODULE), *misshapen_settings(module, _OF_MODULE[:3]))
    words = (*near, *_words(_mapping(both), own, model, is_flag))
    return SettingsRun(
        framework=f"Primus ({name})",
        words=words,
        unknown=tuple(parents.missing),
        assumed=tuple(inserted.assumed),
        left_out=tuple(unread_settings(resolved, [f"modules.{name}.{key}" for key in _OF_MODULE], _SILENT)),
    )


def _is_false(value: Tree) -> bool:
    return isinstance(value, Setting) and value.kind == "boolean" and not value.is_true


def _mapping(tree: Tree | None) -> Mapping[str, Tree]:
    return tree if isinstance(tree, Mapping) else {}


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


def _words(
    tree: Mapping[str, Tree], own: Tree | None, model: Tree | None, is_flag: Callable[[str], bool]
) -> Iterator[Word]:
    """Yield the flags of the keys that are some, and as unknown those that the file or its model adds to Primus's own.

    Primus takes names of destinations: a key such as `disable_bias_linear` sets nothing (`argument_builder.py`).
    """
    for key, value in tree.items():
        added = key in _mapping(own) or (key in _mapping(model) and key not in _WITHOUT_EFFECT)
        words = [] if key in _NOT_FLAGS else list(flag_words(key, value))
        if isinstance(value, Mapping) or is_other_spelling(key):
            switch = value if isinstance(value, Setting) else setting_at(value, "enable")
            if added and not is_null(value) and not (switch and switch.text.lower() == "false"):
                yield unknown_setting(f"overrides.{key}", value)
        elif (words and is_flag(words[0].text)) or (added and (key in _mapping(own) or not _is_false(value))):
            yield from words
