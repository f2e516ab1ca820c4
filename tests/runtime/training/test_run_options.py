"""Options of a run: each is on the command line, in settings files, run.json and notes, and compared, as it states."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.workload import Backend
from megaloom.runtime.cli import main as megaloom
from megaloom.runtime.cli.commands import train_command
from megaloom.runtime.optimizer.recipe import FinalDecay, Recipe, Schedule
from megaloom.runtime.training.resuming import option_notes
from megaloom.runtime.training.run_folder import RunFile
from megaloom.runtime.training.run_options import GROUPS, OPTIONS, RunOptions

VALUES = {
    "data": ("0.3", "/a", "0.7", "/b"),
    "split": "9,1",
    "weights": Path("/trained"),
    "steps_from": "own.py:Steps",
    "out": Path("/out"),
    "tensorboard_dir": Path("/watched"),
    "wandb": "project",
    "async_save": True,
    "eod_token": 3,
    "profile": 3,
    "lr": 0.5,
    "min_lr": 0.25,
    "router_bias_update_rate": 0.5,
    "schedule": Schedule.WSD,
    "backend": Backend.TORCH,
    "final_decay": FinalDecay.COSINE,
    "evaluate_all": False,  # excludes evaluate_batches; OTHERS[1] has it
}


PLAIN_NUMBERS = {
    *("lr", "min_lr", "weight_decay", "clip_grad", "beta1", "beta2", "eps", "router_bias_update_rate"),
    *("initial_loss_scale", "min_loss_scale", "seed", "eod_token", "profile"),
}
"""Options that are factors, or the number of one thing, and so have no unit."""


def hinted(name: str) -> tuple[Any, ...]:
    """Return the types of an option."""
    hint = get_type_hints(GROUPS[OPTIONS[name].group])[name]
    return get_args(hint) or (hint,)


def other_value(name: str) -> Any:
    """Return a value of an option that is not its default."""
    default = OPTIONS[name].default
    if name in VALUES:
        return VALUES[name]
    if isinstance(default, bool):
        return not default
    return (default or 0) + 1 if isinstance(default, int) else 7 if default is None else default / 2


OTHERS = (
    RunOptions().changed(**{name: other_value(name) for name in OPTIONS}),
    RunOptions().changed(evaluate_all=True),
)
"""Options that together are all beside their defaults."""


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[RunOptions]:
    """The options of the commands that a test calls."""
    calls: list[RunOptions] = []
    monkeypatch.setattr(train_command, "run_train", lambda *args: calls.append(args[-1]) or 0)
    return calls


def test_all_options_have_a_value_beside_their_default() -> None:
    for name, option in OPTIONS.items():
        assert any(others.value(option) != option.default for others in OTHERS), name


@pytest.mark.parametrize("others", OTHERS)
def test_each_is_on_the_command_line_with_help(
    others: RunOptions, parsed: list[RunOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for o in OPTIONS.values() if others.value(o) is not None for word in o.words(others.value(o))]
    assert megaloom.main(["train", *words]) == 0
    assert parsed == [others]
    arguments = {
        argument.name: argument for argument in megaloom.app["train"].assemble_argument_collection(parse_docstring=True)
    }
    assert all(arguments[option.flag].parameter.help for option in OPTIONS.values())


def test_each_quantity_has_a_unit_that_the_help_shows() -> None:
    arguments = {argument.name: argument for argument in megaloom.app["train"].assemble_argument_collection()}
    for option in OPTIONS.values():
        shown = arguments[option.flag].parameter.metavar
        assert shown == (option.unit and option.unit.upper()), option.flag
    numbers = {name for name, option in OPTIONS.items() if {int, float} & {*hinted(name)} and option.unit is None}
    assert numbers == PLAIN_NUMBERS


@pytest.mark.parametrize("others", OTHERS)
def test_each_is_in_settings_files(others: RunOptions, parsed: list[RunOptions], tmp_path: Path) -> None:
    values = {o.flag.removeprefix("--"): others.value(o) for o in OPTIONS.values() if others.value(o) is not None}
    file = tmp_path / "settings.yaml"
    file.write_text(json.dumps({"train": values}, default=str))  # which is YAML too
    assert megaloom.main(["train", "--settings", str(file)]) == 0
    assert parsed == [others]


@pytest.mark.parametrize("others", OTHERS)
def test_run_json_has_those_that_a_run_keeps(others: RunOptions, parsed: list[RunOptions], tmp_path: Path) -> None:
    values = json.loads(json.dumps(RunFile(options=others).values))
    lost = {name: option.default for name, option in OPTIONS.items() if not option.kept}
    assert RunFile.of_values(values).options == others.changed(**lost)
    (tmp_path / "run.json").write_text(json.dumps({"version": 1, "options": values}))
    assert megaloom.main(["train", str(tmp_path)]) == 0  # which continues with them, and finds its steps itself
    assert parsed == [others.changed(**lost, steps_from=None)]


def test_ranks_compare_them() -> None:
    for option in OPTIONS.values():
        differ = {
            flag
            for others in OTHERS
            for flag, text in others.compared().items()
            if text != RunOptions().compared()[flag]
        }
        assert (option.flag in differ) == option.compared


def test_a_resumed_run_names_those_that_have_changed() -> None:
    notes = ""
    for others in OTHERS:
        run: Any = SimpleNamespace(before=RunFile(options=RunOptions()), file=RunFile(options=others))
        notes += "".join(option_notes(run, step=3))
    recipe = Recipe().as_saved()  # is compared with that of the checkpoint
    for name, option in OPTIONS.items():
        assert (f"{name.replace('_', '-')} was " in notes) == (option.noted and option.group != "recipe"), name
    assert not any(option.kept < option.noted for option in OPTIONS.values())
    assert not OPTIONS["steps"].noted and OPTIONS["warmup"].noted and "warmup" in recipe


@pytest.mark.parametrize("others", OTHERS)
def test_the_command_to_train_further_repeats_them(others: RunOptions, parsed: list[RunOptions]) -> None:
    assert megaloom.main(["train", *others.words()]) == 0
    once = {name: option.default for name, option in OPTIONS.items() if not option.repeated}
    assert parsed == [others.changed(**once)]
    assert list(RunOptions().words("steps")) == ["--steps", "300"]


def test_a_name_that_no_option_has_is_refused() -> None:
    with pytest.raises(UserError, match="a run has no option 'save_evry': did you mean save_every"):
        RunOptions().changed(save_evry=3)
