"""--set and --settings of `plan` and `megaloom train`: the model, the options, and what the plan keeps."""

from pathlib import Path
from typing import Any

import pytest

from megaloom.dsl.catalog import find
from megaloom.planner.contract.plan_json import load
from megaloom.planner.rules.plan_check import check_plan
from megaloom.runtime.cli import main as megaloom
from megaloom.runtime.cli.commands import train_command
from tests.planner.cli.test_plan import run

SETTINGS = """
[model]
layers = 3
embed = 64
[plan]
gpus = "4xCPU"
precision = "fp32"
tp = 2
[train]
lr = 1e-3
save-every = 7
data = ["a.txt", "b.txt"]
deterministic = true
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "settings.toml"
    path.write_text(SETTINGS)
    return path


def test_the_plan_keeps_the_arguments(settings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("stdlib-gpt", "--settings", settings.name, "--set", "layers=2", "--gpus", "2xCPU", "--seq", "64")
    code, _, err = run(*args, capsys=capsys)
    assert (code, err) == (0, "")
    plan = load("plan.json")
    assert plan.model == "megaloom.examples.stdlib_gpt:stdlib_gpt(layers=2, embed=64)"
    assert (str(plan.cluster), plan.layout.tp, plan.workload.precision) == ("2xCPU", 2, "fp32")
    check_plan(plan, find(plan.model)[0])
    assert megaloom.main(["train", "plan.json", "--set", "layers=3"]) == 2
    assert "plan.json is a plan of" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_show_takes_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert megaloom.main(["show", "stdlib-gpt", "--set", "layers=1", "--seq", "64"]) == 0
    assert capsys.readouterr().out.startswith("stdlib-gpt: 217,472 parameters")
    assert megaloom.main(["show", "stdlib-gpt", "--set", "layer=1"]) == 2
    assert "did you mean layers?" in capsys.readouterr().err


def test_train_takes_its_options_from_the_file(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(train_command, "run_train", lambda *args: calls.append(args) or 0)
    assert megaloom.main(["train", "--settings", str(settings), "--lr", "0.5"]) == 0
    ((model, arguments, _, options),) = calls
    recipe = options.recipe
    assert model is None  # which stands for stdlib-gpt
    assert (recipe.lr, recipe.deterministic, recipe.steps) == (0.5, True, 300)
    assert (options.saving.save_every, options.data.data) == (7, ("a.txt", "b.txt"))
    assert arguments == {"layers": 3, "embed": 64}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[train]\nstep = 3\n", "s.toml: [train] has no option 'step': did you mean steps?"),
        ("[train]\nset = 3\n", "s.toml: [train] has no option 'set'"),
        ('[train]\nsteps = "many"\n', "s.toml: --steps must be a whole number, got 'many'"),
        ("[train]\nsteps = 1.5\n", "s.toml: --steps must be a whole number, got '1.5'"),
        ("[model]\nlayers = 1.5\n", "layers must be a whole number, got 1.5"),
    ],
)
def test_wrong_settings_are_named(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.toml").write_text(text)
    assert megaloom.main(["train", "--settings", "s.toml"]) == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["s.toml"]
