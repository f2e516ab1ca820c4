"""FlagScale: an experiment with a `train` group, whose leaves are flags of Megatron-LM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import evolve

from megaloom.planner.runs.settings.flag_words import SettingsRun, flag_words
from megaloom.planner.runs.settings.interpolation import Interpolation
from megaloom.planner.runs.settings.near_names import near_names
from megaloom.planner.runs.settings.tree import Setting, Tree, found, leaves, setting_at
from megaloom.planner.runs.words import Word

_GROUPS = ("system", "model", "data")
_PATHS = ("experiment.runner.nnodes", "experiment.runner.nproc_per_node", "experiment.envs", "train")


def is_flagscale(tree: Tree | None) -> bool:
    """Return True for an experiment with a group `train`, and for a file of such a group."""
    inner = found(tree, "train")
    group = inner if isinstance(inner, Mapping) and found(inner, "model") is not None else tree
    return isinstance(found(group, "system"), Mapping) and isinstance(found(group, "model"), Mapping)


def flagscale_run(tree: Tree, environment: Mapping[str, str]) -> SettingsRun:
    """Return the run of a FlagScale experiment."""
    inserted = Interpolation(tree, environment)
    resolved = inserted.resolved(tree)
    train = found(resolved, "train")
    group = train if isinstance(train, Mapping) else resolved
    nodes = setting_at(resolved, "experiment.runner.nnodes")
    per_node = setting_at(resolved, "experiment.runner.nproc_per_node")
    if per_node is None and setting_at(resolved, "experiment.runner.hostfile") is None:
        per_node = _visible(setting_at(resolved, "experiment.envs.CUDA_VISIBLE_DEVICES"))
    variables = {n: v.word for n, v in leaves(found(resolved, "experiment.envs")) if isinstance(v, Setting)}
    return SettingsRun(
        framework="FlagScale",
        words=(*near_names(resolved, _PATHS), *_words(group)),
        nodes=nodes.word if nodes else None,
        per_node=per_node.word if per_node else None,
        environment=variables,
        assumed=tuple(inserted.assumed),
    )


def _visible(devices: Setting | None) -> Setting | None:
    """Return the number of visible devices, which FlagScale starts where neither a number nor a host file says so."""
    if devices is None or not all(one.strip().isdecimal() for one in devices.text.split(",")):
        return None
    return Setting(evolve(devices.word, text=str(len(devices.text.split(",")))), "number")


def _words(group: Tree | None) -> Iterator[Word]:
    yield from near_names(group, _GROUPS)
    for name in _GROUPS:
        for path, value in leaves(found(group, name)):
            key = path.rpartition(".")[2].replace("-", "_")
            yield from flag_words(key, value)
