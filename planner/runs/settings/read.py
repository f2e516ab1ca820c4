"""Reading of settings files: the format is recognised from the content; another one is refused by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.dsl.quoting import printable
from megaloom.planner.runs.settings.accelerate import accelerate_run, is_accelerate
from megaloom.planner.runs.settings.bridge import bridge_run, is_bridge
from megaloom.planner.runs.settings.flag_words import SettingsRun
from megaloom.planner.runs.settings.flagscale import flagscale_run, is_flagscale
from megaloom.planner.runs.settings.flagscale_group import with_experiment
from megaloom.planner.runs.settings.nemo import is_nemo, nemo_run
from megaloom.planner.runs.settings.nemo_rl import is_nemo_rl, nemo_rl_run
from megaloom.planner.runs.settings.overrides import (
    check_overrides,
    is_override,
    override_tree,
    repeated_overrides,
    unread_overrides,
)
from megaloom.planner.runs.settings.parents import ParentFiles, chosen_groups
from megaloom.planner.runs.settings.primus import is_primus, override_path, primus_run
from megaloom.planner.runs.settings.primus_command import PrimusCommand, near_file, primus_command
from megaloom.planner.runs.settings.swift import is_swift, swift_run
from megaloom.planner.runs.settings.toml_tree import toml_tree
from megaloom.planner.runs.settings.torchtitan import is_torchtitan, torchtitan_run
from megaloom.planner.runs.settings.torchtitan_cli import option_tree
from megaloom.planner.runs.settings.tree import Tree, found, overlaid, placed
from megaloom.planner.runs.settings.verl import is_verl, verl_run
from megaloom.planner.runs.words import Command, Word

_READ = "NeMo 1, NeMo-RL, Primus, FlagScale, verl, Megatron-Bridge, Accelerate (YAML) and torchtitan (TOML)"
_OTHERS = {
    "pipe-parallel-size": "a file of GPT-NeoX",
    "pipe_parallel_size": "a file of GPT-NeoX",
    "zero_optimization": "a file of DeepSpeed",
    "model_name_or_path": "a file of LLaMA-Factory or TRL",
    "base_model": "a file of Axolotl",
    "recipe": "a file of Automodel or torchtune",
    "fsdp_config": "a file of llm-foundry",
    "parallelism": "a file of nanotron",
    "language_model": "a file for `--yaml-cfg` of Megatron-LM",
}
"""Formats that are not read, by a key that they have."""
_PROGRAMS = "main_"
_BASE = "ppo_megatron_trainer"
"""verl's own settings for Megatron, of which the defaults are taken."""


def settings_text(
    text: str,
    path: str,
    environment: Mapping[str, str],
    overrides: Sequence[Word] = (),
    is_flag: Callable[[str], bool] = lambda _: True,
    flags: Sequence[Word] = (),
) -> SettingsRun:
    """Return the run of a settings file's text.

    `overrides` are words KEY=VALUE that count more than the file. `is_flag` says of a word such as `--num-layers`
    whether Megatron-LM has this flag; keys of a framework's own parent files that are none are left out. `flags` are
    the user's, for a file that has the layout only.
    """
    if Path(path).suffix == ".toml":
        tree: Tree | None = overlaid(toml_tree(text, path), option_tree(overrides))
        if not is_torchtitan(tree) or tree is None:
            raise UserError(f"{path} is TOML, but not of torchtitan\nread are {_READ}")
        return torchtitan_run(tree)
    chosen = chosen_groups(text, path, overrides)
    parents = ParentFiles(Path(path).parent, {key.partition("@")[0].strip("/+"): name for key, name in chosen.items()})
    tree = parents.composed(text, path)
    overrides = [word for word in overrides if word.text.partition("=")[0] not in chosen]
    check_overrides(overrides, tree)
    if overrides:
        inside = override_path(tree) if is_primus(tree) else ""
        tree = overlaid(tree, placed(inside, override_tree(overrides)))
    missing = tuple(parents.missing)
    if tree is None or not isinstance(tree, Mapping):
        raise UserError(f"{path} has no settings\nread are {_READ}")
    if is_primus(tree):
        return primus_run(tree, path, environment, is_flag)
    if is_nemo_rl(tree):
        return nemo_rl_run(tree, path, environment, missing)
    if is_verl(tree):
        return verl_run(tree, environment)
    if is_nemo(tree):
        return nemo_run(tree, environment, missing)
    if is_accelerate(tree):
        return accelerate_run(tree, path, flags)
    if is_flagscale(tree):
        experiment = with_experiment(tree, path)
        run = flagscale_run(experiment.tree, environment)
        return evolve(run, beside=experiment.path)
    other = next((name for key, name in _OTHERS.items() if found(tree, key) is not None), None)
    if other is None and is_bridge(tree):
        return bridge_run(tree, environment)
    raise UserError(f"{path} is {other or 'YAML of a format that is not known'}\nread are {_READ}")


def settings_command(
    command: Command, environment: Mapping[str, str], script: str = "", is_flag: Callable[[str], bool] = lambda _: True
) -> SettingsRun | None:
    """Return the run of a command of ms-swift, Primus or verl; None for another command.

    script: the path of the script that has the command. is_flag: see `settings_text`.
    """
    if primus := primus_command(command):
        return _of_primus(primus, command, environment, script, is_flag)
    if is_swift(command):
        return swift_run(command)
    tree = override_tree(command.words)
    if not is_verl(tree):
        return None
    lasts = [word.text.rpartition(".")[2] for word in command.words]
    program = [n + 1 for n, last in enumerate(lasts) if last == "py" or last.startswith(_PROGRAMS)]
    first = program[0] if program else next(n for n, word in enumerate(command.words) if is_override(word))
    run = verl_run(tree, environment)
    unread = [word for word in unread_overrides(command.words[first:]) if _BASE not in word.text]
    left_out = (*run.left_out, *unread)
    return evolve(run, repeated=repeated_overrides(command.words), left_out=left_out)


def _of_primus(
    primus: PrimusCommand,
    command: Command,
    environment: Mapping[str, str],
    script: str,
    is_flag: Callable[[str], bool],
) -> SettingsRun:
    config = primus.config
    path = near_file(config.text, script)
    if path is None:
        raise UserError(
            f"{config.origin}: the settings file {printable(config.text)} is not there\nrun this in its repository"
        )
    known = {name: word.text for name, word in command.environment.items() if not word.unknown}
    text = ParentFiles(Path(path).parent).read(Path(path)) or ""
    run = settings_text(text, path, {**known, **environment}, primus.overrides, is_flag)
    machines, each = command.environment.get("NNODES"), command.environment.get("GPUS_PER_NODE")
    return evolve(run, nodes=machines, per_node=each)
