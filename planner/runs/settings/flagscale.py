"""FlagScale: an experiment with a `train` group, whose leaves are flags of Megatron-LM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath

from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.settings.flag_words import SettingsRun, passed_words
from megaloom.planner.runs.settings.interpolation import Interpolation
from megaloom.planner.runs.settings.near_names import near_names
from megaloom.planner.runs.settings.tree import Setting, Tree, found, leaves, setting_at
from megaloom.planner.runs.settings.unread import misshapen_settings, unread_settings
from megaloom.planner.runs.words import Unknown, Word

_GROUPS = ("system", "model", "data")
_RUNNER = "experiment.runner"
_PATHS = (
    f"{_RUNNER}.nnodes",
    f"{_RUNNER}.nproc_per_node",
    "experiment.envs",
    "experiment.task.backend",
    "experiment.task.entrypoint",
    "train",
)
_SILENT = (
    *("action", "hydra", *(f"experiment.{key}" for key in ("exp_name", "exp_dir", "cmds", "task.type"))),
    *("experiment.seed", "experiment.save_steps", "experiment.load"),
    *("experiment.ckpt_format", f"{_RUNNER}.hostfile", f"{_RUNNER}.backend", f"{_RUNNER}.type", f"{_RUNNER}.ssh_port"),
    *(f"{_RUNNER}.{key}" for key in ("rdzv_backend", "rdzv_id", "rdzv_endpoint", "per_node_task", "no_shared_fs")),
    *(f"{_RUNNER}.{key}" for key in ("node_rank", "master_addr", "master_port", "tee", "redirects", "log_dir")),
)
"""Keys of an experiment that change no step; those of other names are passed to torchrun, or to nobody."""
_NOT_PASSED = frozenset({"log_dir", "details_dir", "scripts_dir", "pids_dir"})
"""Keys of which FlagScale makes no flag (`_get_args_megatron` in flagscale/runner/runner_train.py)."""


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
    backend = setting_at(resolved, "experiment.task.backend")
    if backend and not backend.word.unknown and backend.text != "megatron":
        raise UserError(f"{backend.word.origin}: FlagScale's backend {backend.text:.40} is not read\nread is megatron")
    program = setting_at(resolved, "experiment.task.entrypoint")
    if program and not program.word.unknown and PurePath(program.text).name != "train_gpt.py":
        raise UserError(f"{program.word.origin}: FlagScale trains with {program.text:.60}\nread is train_gpt.py")
    nodes, per_node = _started(resolved)
    variables = {n: v.word for n, v in leaves(found(resolved, "experiment.envs")) if isinstance(v, Setting)}
    return SettingsRun(
        framework="FlagScale",
        words=(*near_names(resolved, _PATHS), *misshapen_settings(resolved, _PATHS[:2]), *_words(group)),
        nodes=nodes,
        per_node=per_node,
        environment=variables,
        assumed=tuple(inserted.assumed),
        left_out=tuple(_unread(resolved, isinstance(train, Mapping))),
    )


def _unread(tree: Tree | None, is_experiment: bool) -> Iterator[Word]:
    groups = [f"train.{name}" for name in _GROUPS] if is_experiment else _GROUPS
    beside = [path for path in _PATHS if path != "train"] if is_experiment else []
    return unread_settings(tree, (*groups, *beside), _SILENT if is_experiment else ())


def _started(tree: Tree | None) -> tuple[Word | None, Word | None]:
    """Return the machines and the processes of each that FlagScale starts.

    Without a host file it starts one machine (`runner_train.py`), with the fewer of the stated processes and of the
    visible devices. A host file lies elsewhere, so its machines count only as far as the file states their number.
    """
    nodes, per_node = setting_at(tree, f"{_RUNNER}.nnodes"), setting_at(tree, f"{_RUNNER}.nproc_per_node")
    cloud = setting_at(tree, f"{_RUNNER}.type")
    visible = _visible(setting_at(tree, "experiment.envs.CUDA_VISIBLE_DEVICES"))
    both = [one for one in (per_node, visible) if one is not None]
    fewest = min(both, key=lambda one: int(one.text) if one.text.isdecimal() else 0, default=None)
    hosts = setting_at(tree, f"{_RUNNER}.hostfile")
    if hosts is None:
        unclear = nodes if nodes and nodes.text != "1" else None  # several machines without a host file
    else:
        unclear = hosts if nodes is None else None
    if unclear is not None and not (cloud and cloud.text == "cloud"):
        unknown = (Unknown(f"{_RUNNER}.hostfile", "file", unclear.word.origin),)
        return evolve(unclear.word, text="", unknown=unknown), fewest.word if fewest else None
    return nodes.word if nodes else None, fewest.word if fewest else None


def _visible(devices: Setting | None) -> Setting | None:
    """Return the number of visible devices, which FlagScale starts where neither a number nor a host file says so."""
    if devices is None or not all(one.strip().isdecimal() for one in devices.text.split(",")):
        return None
    return Setting(evolve(devices.word, text=str(len(devices.text.split(",")))), "number")


def _words(group: Tree | None) -> Iterator[Word]:
    """Yield each leaf of the groups as a flag of its last name; a key of a later group stands for all of an earlier."""
    yield from near_names(group, _GROUPS)
    joined: dict[str, Tree] = {}
    for name in _GROUPS:
        section = found(group, name)
        joined |= dict(section) if isinstance(section, Mapping) else {}
    for path, value in leaves(joined):
        key = path.rpartition(".")[2]
        if key not in _NOT_PASSED:
            yield from passed_words(key, value)
