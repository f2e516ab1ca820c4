"""`--steps-from file.py:Class`: a run trains, continues and is evaluated with steps of the user's own."""

import json
from pathlib import Path

import numpy as np
import pytest

from megaloom.dsl.errors import UserError
from megaloom.runtime.cli.main import main
from megaloom.runtime.data.indexed import write_indexed
from megaloom.runtime.training.evaluation import evaluate_run
from megaloom.runtime.training.run_options import RunOptions
from megaloom.runtime.training.steps_reference import StepsReference, steps_note, with_steps
from tests.support.limits import LIMIT

OWN = """from megaloom.dsl import *
def tiny() -> Model:
    wte = weight("wte", Dim("vocab", 260), Dim("embed", 16))
    return model("tiny", ids() >> Embed(wte) >> RMSNorm() >> Unembed(wte) >> NextToken())

class Scaled:
    def __init__(self, factor=1.0):
        if factor < 0:
            raise ValueError("a negative factor")
        self.factor = factor

    def scaled(self, outputs, by):
        loss, weight = outputs.loss_sum, outputs.weight_sum
        return by * self.factor * loss, weight, {"mean loss": (loss, weight)}

    def training_step(self, forward, batch):
        return self.scaled(forward(batch), 1)

    def validation_step(self, forward, batch):
        return self.scaled(forward(batch), 10)

    def test_step(self, forward, batch):
        return self.scaled(forward(batch), 100)

class Misspelt:
    def train_step(self, forward, batch): ...

def scaled(): ...
"""
OPTIONS = ("--devices", "1", "--seq", "16", "--batch", "2", "--split", "80,10,10", "--evaluate-all")


@pytest.mark.timeout(LIMIT)
def test_a_run_keeps_its_steps(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own, run = Path("own.py"), Path("runs/a")
    own.write_text(OWN)
    write_indexed([np.frombuffer(b"The quick brown fox jumps over the lazy dog. " * 40, np.uint8)], Path("text"), "u1")
    steps = "own.py:Scaled(factor=2.0)"
    train = ["train", "own.py:tiny", "--data", "text", *OPTIONS, "--steps", "1", "--out", str(run)]
    assert main([*train, "--steps-from", steps]) == 0
    said = capfd.readouterr().out
    assert f"steps of {own.resolve()}:Scaled(factor=2.0)\n" in said
    assert "--steps-from 'own.py:Scaled(factor=2.0)'" in said[said.index("to train further") :]
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ends = {e["event"]: e for e in events}
    for part, event, factor in (("validation", "evaluation", 20), ("test", "test", 200)):
        result = evaluate_run(run, part=part).losses[0].result
        assert (result.loss, result.tokens) == (ends[event]["loss"], ends[event]["tokens"])
        assert result.loss == pytest.approx(factor * result.report["mean loss"])
    declared = evaluate_run(run, part="test", steps="none").losses[0].result
    assert declared.loss == pytest.approx(result.report["mean loss"])
    assert main(["train", str(run), "--steps", "2"]) == 0
    said = capfd.readouterr().out
    assert f"steps of {own.resolve()}:Scaled(factor=2.0)\n" in said and "steps-from was" not in said
    own.write_text(OWN + "\n")
    for command in (["evaluate", str(run)], ["train", str(run), "--steps", "3"]):
        assert main(command) == 2
        assert f"runs/a has the steps of {own.resolve()}:Scaled(factor=2.0), but {own.resolve()} has changed" in (
            capfd.readouterr().err
        )
    own.rename("moved.py")
    assert main(["evaluate", str(run)]) == 2
    assert f", but there is no file {own.resolve()}\ngive --steps-from FILE.py:Class" in capfd.readouterr().err
    assert main(["evaluate", str(run), "--steps-from", steps.replace("own", "moved")]) == 0
    assert "mean loss" in capfd.readouterr().out


REFUSED = {
    "gone.py:Scaled": "there is no file gone.py\n--steps-from can be file.py:Class or package.module:Class",
    "no.module:Scaled": "there is no module 'no.module', of 'no.module:Scaled'\n",
    "own.py:Scaling": "/own.py has no class 'Scaling'\nit has Scaled",
    "own.py:scaled": "/own.py has no class 'scaled'\nit has Scaled",
    "own.py:Misspelt": "/own.py:Misspelt is a class without steps\nwrite any of data_step, training_step, ",
    "own.py:Scaled(by=1)": "/own.py:Scaled: got an unexpected keyword argument 'by'\n",
    "own.py:Scaled(factor=-1)": "/own.py:Scaled(factor=-1) fails: ValueError: a negative factor\n  at own.py:9",
    "subprocess:Popen(args='ls')": "subprocess:Popen is a class without steps\n",
}


@pytest.mark.parametrize("ref", REFUSED)
def test_what_names_no_steps_is_refused(ref: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    with pytest.raises(UserError) as raised:
        StepsReference.of(ref)
    assert REFUSED[ref] in str(raised.value)


def test_steps_given_as_an_object_are_not_kept() -> None:
    file = with_steps(RunOptions(), object())
    assert file.values["steps_object"] == "builtins.object"
    assert steps_note(None, file).startswith("the run had steps of builtins.object, which it does not keep, since ")
    assert steps_note(None, None) == steps_note(object(), file) == ""


def test_the_only_class_with_steps_needs_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    assert StepsReference.of("own.py").ref == f"{tmp_path}/own.py:Scaled"
    Path("own.py").write_text(OWN + "#")
    with pytest.raises(UserError, match="has changed since this process has read it\nstart a new process"):
        StepsReference.of("own.py:Scaled")
    Path("two.py").write_text(f"{OWN}\nclass Other(Scaled): ...\n")
    with pytest.raises(UserError, match=r"two.py has several classes with steps: name one as .*two.py:Scaled; it has"):
        StepsReference.of("two.py")
