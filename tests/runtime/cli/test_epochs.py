"""Options of `train` that count epochs, and those of evaluations; the tensors that a run has saved."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaloom.runtime.cli.main import main
from megaloom.runtime.data.indexed import write_indexed
from tests.support.limits import LIMIT

MODELS = """from megaloom.dsl import *
def tiny() -> Model:
    wte = weight("wte", Dim("vocab", 260), Dim("embed", 32))
    x = ids() >> Embed(wte) >> residual(RMSNorm(), MLP(64)) >> RMSNorm()
    return model("tiny", x >> Unembed(wte) >> NextToken())
"""
EPOCHS = ("--epochs", "2", "--save-every-epoch", "--evaluate-every-epoch", "--evaluate-micro-batch", "1")


def events(run: str, kind: str) -> list[dict[str, Any]]:
    """Return the events of a kind in the metrics of a run."""
    lines = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
    return [event for event in lines if event["event"] == kind]


@pytest.mark.timeout(LIMIT)
def test_a_run_evaluates_and_saves_at_the_ends_of_epochs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of an evaluation does not depend on its micro-batch. --clip-grad 0 is a limit that nothing reaches."""
    monkeypatch.chdir(tmp_path)
    Path("models.py").write_text(MODELS)
    write_indexed([np.frombuffer(b"The quick brown fox jumps over the lazy dog. " * 20, np.uint8)], Path("text"), "u1")
    train = ["train", "models.py:tiny", "--devices", "1", "--seq", "16", "--batch", "4", "--data", "text"]
    train += ["--split", "90,10", "--vocab-multiple", "64"]
    assert main([*train, "--out", "a", *EPOCHS, "--keep-last", "9", "--clip-grad", "0"]) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert "49 training samples of 16 tokens; 25 steps of 4 are 2.04 epochs" in said
    assert "batch of 4: 4 on each data-parallel rank, in micro-batches of " in said
    assert "vocabulary: 260 tokens, padded to 320 (tp 1 x 64)" in said
    assert "--evaluate-every-epoch" in said[said.index("to train further") :]
    assert sorted(path.name for path in Path("a").glob("step-*")) == ["step-000013-epoch-1", "step-000025-epoch-2"]
    assert [x["step"] for x in events("a", "evaluation")] == [13, 25]
    assert main([*train, "--out", "b", "--steps", "25", "--clip-grad", "1e9"]) == 0
    losses = [[x["loss"] for x in events(run, "step")] for run in "ab"]
    assert losses[0] == losses[1]
    capfd.readouterr()
    found = []
    for size in ("1", "3"):
        assert main(["evaluate", "a", "--micro-batch", size]) == 0
        found.append(capfd.readouterr().out.split("text")[-1])
    assert found[0] == found[1]
    check_tensors(capfd)


def check_tensors(capfd: pytest.CaptureFixture[str]) -> None:
    """The tensors of a run are those of its newest checkpoint, moments included."""
    listed = []
    for path in ("a", "a/step-000025-epoch-2"):
        assert main(["show", path, "--tensors"]) == 0
        listed.append(capfd.readouterr().out.splitlines())
    assert listed[0] == listed[1]
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in listed[0] if line}
    assert rows["mlp.0.up"] == rows["exp_avg.mlp.0.up"] == "[32, 64] float32"
    assert main(["show", "a", "--tensors", "--svg", "a.svg"]) == 2
    assert "--svg has no effect with --tensors" in capfd.readouterr().err
    assert main(["show", "text", "--tensors"]) == 2
    assert "text is not a folder" in capfd.readouterr().err
