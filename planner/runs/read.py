"""Reading of a run from a file: its kind is found, and the reader of that kind returns the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import evolve, field, frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.quoting import printable, shortened

from .argument_file import argument_words, is_argument_file
from .choice import chosen_launch, no_launch
from .deepspeed_file import deepspeed_words
from .launch import (
    USUAL_PROGRAM,
    Launch,
    check_first_words,
    check_program,
    launched_devices,
    lost_ending,
    started_by,
    training_commands,
    unread_counts,
)
from .launcher_options import unknown_options
from .megatron.log import check_beginning, is_log, read_log
from .megatron.parser import parse_words, table
from .megatron.read import ArgumentSource, Hints, read_run
from .own_plan import is_own_plan, plan_run
from .recipes.command import recipe_command
from .recipes.read import recipe_run
from .recipes.release import release_in_comment
from .run import Devices, Note, TrainingRun
from .settings import SettingsRun, primus_command, settings_command, settings_text
from .settings.bridge import bridge_run
from .settings.bridge_script import bridge_script_tree, is_bridge_script
from .settings.published import not_modelled, published_model
from .settings.torchtitan_judged import left_out_of_torchtitan
from .settings.torchtitan_words import torchtitan_options, torchtitan_words
from .settings.unread import note_of_unread
from .shell.read import script_of_text
from .slime import is_slime, repeated_flags, slime_devices, slime_words
from .words import Origin, Script, Word

LOG_BYTES = 2**28  # of a log; more than any that was seen
MOST_ASSUMED = 5  # variables without a value that are named
OF_LAUNCH = ("MASTER_", "CUDA_", "NCCL_", "WANDB_", "NODE_RANK")  # variables that say nothing of a training step
SECRETS = ("_KEY", "_TOKEN")
NO_DEVICES = "the number of GPUs is not stated in {}\ngive it with their kind: --gpus 64xH100"
BYTE_ORDER_MARK = "\ufeff"
WINDOWS_LINES = Note("the lines end as on Windows, at which bash fails; they are read as if they did not")
SETTINGS = frozenset({".yaml", ".yml", ".toml"})
NOT_READ = {
    ".json": "a JSON file",
    ".ipynb": "a notebook",
}
"""Kinds of files that are not read, by the end of their names."""


@frozen(kw_only=True)
class RunInputs:
    """Facts that a user gives with the file: variables, arguments of the script, the number of devices, hints."""

    environment: Mapping[str, str] = field(factory=dict)
    positional: Sequence[str] = ()
    devices: int | None = None
    hints: Hints = field(factory=Hints)
    flags: tuple[Word, ...] = ()  # that stand after those of the file
    command: str | None = None  # number of the training command, counted from 1, or name of a Python function


def read_file(path: str, given: RunInputs) -> TrainingRun:
    """Return the run of a file. Raise UserError for a file of a kind that is not read, and for what is not known."""
    return read_text(file_text(path), path, given)


def read_text(text: str, path: str, given: RunInputs) -> TrainingRun:
    """Return the run of a file's text; its path is used in origins, and to find the files beside it."""
    text = text.removeprefix(BYTE_ORDER_MARK)
    if is_log(text):
        return read_log(text, path, given.devices, given.hints)
    check_beginning(text, path)
    if Path(path).suffix.lower() in SETTINGS:
        overrides = [Word(text, Origin("--", n)) for n, text in enumerate(given.positional, 1)]
        settings = settings_text(text, path, given.environment, overrides, lambda flag: flag in table(), given.flags)
        release = release_in_comment(text, settings.framework) or settings.version
        return _of_settings(evolve(settings, version=release), path, given)
    if Path(path).suffix.lower() == ".py":
        return _of_python(text, path, given)
    if is_own_plan(text):
        return plan_run(text, path)
    if kind := NOT_READ.get(Path(path).suffix.lower()):
        raise UserError(
            f"{path} is {kind}, which is not read\n"
            "give a log of Megatron-LM, or the script or command line that starts it"
        )
    if is_argument_file(text):
        return _of_arguments(text, path, given)
    run = _of_script(script_of_text(text, path, given.environment, given.positional), path, given)
    windows = (WINDOWS_LINES,) if "\r\n" in text else ()
    return evolve(run, assumed=(*lost_ending(text, path), *run.assumed, *windows))


def _of_python(text: str, path: str, given: RunInputs) -> TrainingRun:
    """Return the run of a Python file, which is parsed, never imported."""
    if is_bridge_script(text):
        settings = bridge_run(bridge_script_tree(text, path), given.environment)
        release = release_in_comment(text, settings.framework)
        return _of_settings(evolve(settings, version=release), path, given)
    overrides = [Word(text, Origin("--", n)) for n, text in enumerate(given.positional, 1)]
    settings = recipe_run(text, path, given.environment, overrides, given.command)
    release = release_in_comment(text, settings.framework) or settings.version
    return _of_settings(evolve(settings, version=release), path, given)


def file_text(path: str) -> str:
    """Return the text of a file, with other characters for bytes that are not UTF-8."""
    file = Path(path)
    try:
        if file.stat().st_size > LOG_BYTES:
            raise UserError(f"{path} has more than {LOG_BYTES:,} bytes\ngive its beginning, up to some 100 iterations")
        return file.read_bytes().decode(errors="replace")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _of_arguments(text: str, path: str, given: RunInputs) -> TrainingRun:
    """Return the run of a file that has only flags and their values."""
    if given.devices is None:
        raise UserError(NO_DEVICES.format(path))
    arguments = parse_words((*argument_words(text, path), *given.flags))
    return read_run(arguments, ArgumentSource(path, Devices(given.devices), hints=given.hints))


def _states_layers(*words: Sequence[Word]) -> bool:
    return any(word.text.partition("=")[0] == "--num-layers" for several in words for word in several)


def _of_settings(settings: SettingsRun, path: str, given: RunInputs) -> TrainingRun:
    """Return the run of a settings file, or of settings on a command line."""
    for lacking in settings.unknown:
        raise UserError(
            f"{lacking.origin}: the parent file {printable(lacking.name)} is not there, and what it sets is not known\n"
            "run this in its repository, or put the file there"
        )
    assumed = f"{settings.framework}'s settings as flags of Megatron-LM; the prediction is for Megatron-core"
    left_out: tuple[Note, ...] = ()
    if settings.beside:
        assumed += f"; read with {printable(settings.beside)}, which stands beside the file"
    if settings.framework == "torchtitan":
        options = torchtitan_options(settings.words)
        left_out = tuple(Note(text, origin) for text, origin in left_out_of_torchtitan(options))
        words = tuple(torchtitan_words(settings.words, path, given.devices))
        settings = evolve(settings, words=words, program="train.py")
    elif settings.model and not _states_layers(settings.words):
        name = settings.model
        model = published_model(name.text)
        if model is None:
            why = not_modelled(name.text)
            why = f": {why}" if why else ", of which the sizes are not known"
            raise UserError(f"{name.origin}: {settings.framework} trains {printable(name.text)}{why}")
        settings = evolve(settings, words=(*model.words(name), *settings.words))
        assumed += f"; the sizes of {name.text} as it was published"
    elif settings.framework == "Megatron-Bridge" and not _states_layers(settings.words, given.flags):
        raise UserError(
            f"{path} states no model: it changes a recipe of Megatron-Bridge\n"
            "read the recipe with these changes after `--`, as in `-- train.global_batch_size=64`"
        )
    run = _of_script(settings.script(path), path, evolve(given, command=None), of_settings=True)
    defaults = run.defaults or f"{run.program} {run.version}".strip()
    run = evolve(run, program=settings.framework, version=settings.version, defaults=defaults)
    said = (*_again(settings.repeated), *note_of_unread(settings.left_out))
    return evolve(run, assumed=(Note(assumed), *run.assumed, *said), notes=(*run.notes, *left_out))


def _again(repeated: Sequence[Word]) -> list[Note]:
    """Return the notes on settings and options that stand again with another value."""
    return [Note(f"{shortened(one.text, 60)} stands again: its last value counts", one.origin) for one in repeated]


def _of_script(script: Script, path: str, given: RunInputs, *, of_settings: bool = False) -> TrainingRun:
    """Return the run of a script's training command. of_settings: its words stand for settings."""
    check_first_words(script)
    launches = [one for one in training_commands(script) if not primus_command(one.command)]
    if not launches:
        for command in script.commands:
            if settings := settings_command(command, given.environment, path, lambda flag: flag in table()):
                return _of_settings(settings, path, given)
            if recipe := recipe_command(command, path, given.environment):
                machines = launched_devices(started_by(command), script.sbatch)
                count = given.devices or (machines.count if machines else None)
                return _of_settings(recipe, path, evolve(given, devices=count))
        raise no_launch(script, path)
    chosen = chosen_launch(launches, given.command, path)
    launch = chosen.launch
    check_program(launch.program)
    assumed = list(chosen.assumed)
    if is_slime(launch.words):
        stated = slime_devices(launch.words, given.devices)
        launch = evolve(launch, words=slime_words(launch.words, given.flags))
        assumed.append(Note("slime's flags of generation, rewards and logs are left out", launch.program.origin))
        assumed += repeated_flags(chosen.launch.words)
    else:
        stated = launched_devices(launch, script.sbatch)
    unread = () if is_slime(chosen.launch.words) else tuple(unread_counts(launch, script.sbatch))
    devices = _devices(stated, given.devices, launch, unread)
    assumed += (*unread, *unknown_options(launch.before, script.sbatch), *_again(script.repeated))
    if (name := Path(launch.program.text).name) != USUAL_PROGRAM:
        assumed.append(Note(f"{shortened(name, 40)} trains as Megatron-LM's {USUAL_PROGRAM}", launch.program.origin))
    matter = [one for one in script.assumed if not (one.name.startswith(OF_LAUNCH) or one.name.endswith(SECRETS))]
    assumed += [Note(f"{one.kind} {one.name} not given", one.origin) for one in matter[:MOST_ASSUMED]]
    if stated and devices.count != stated.count:
        assumed.append(Note(f"{devices.count} GPUs (`--gpus`), though the file starts {stated.count}", stated.origin))
    words = (*launch.words, *deepspeed_words(launch.words, script.files), *given.flags)
    arguments = parse_words(words, of_settings=of_settings)
    return read_run(arguments, ArgumentSource(path, devices, tuple(assumed), hints=given.hints))


def _devices(stated: Devices | None, given: int | None, launch: Launch, unread: Sequence[Note]) -> Devices:
    """Return the devices of a launch. given: their number, if the user states it. unread: counts that are not known."""
    if given is not None:
        return evolve(stated or Devices(given), count=given)
    if stated is None and unread:
        raise UserError(f"{unread[0].origin}: {unread[0].text}\ngive the GPUs with their kind: --gpus 64xH100")
    if stated is None:
        raise UserError(NO_DEVICES.format(launch.program.origin.path))
    return stated
