"""`megaloom train --from RUN`: a run starts anew from the weights of another one, packed or not."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megaloom.dsl.catalog import find
from megaloom.dsl.errors import UserError
from megaloom.runtime.cli.main import main
from megaloom.runtime.data.indexed import write_indexed
from megaloom.runtime.training.initial_weights import open_weights
from tests.support.limits import LIMIT

MODELS = """from megaloom.dsl import *
def tiny(ff: int = 64, eps: float = 1e-6) -> Model:
    wte = weight("wte", Dim("vocab", 260), Dim("embed", 32))
    x = ids() >> Embed(wte) >> repeat(2, residual(RMSNorm(eps=eps), MLP(ff))) >> RMSNorm(eps=eps)
    return model("tiny", x >> Unembed(wte) >> NextToken())
"""
OPTIONS = ("--devices", "1", "--seq", "16", "--batch", "2", "--split", "90,10")


def weights(folder: Path, ref: str) -> dict[str, torch.Tensor]:
    """Return the weights that a run gives a model."""
    return {name: view.read() for name, view in open_weights(folder).of(find(ref)[0]).items()}


@pytest.mark.timeout(LIMIT)
def test_a_declared_model_starts_anew_from_a_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from a packed run, and with adapters, which the next run merges."""
    monkeypatch.chdir(tmp_path)
    Path("models.py").write_text(MODELS)
    ref = "models.py:tiny"
    write_indexed([np.frombuffer(b"The quick brown fox jumps over the lazy dog. " * 20, np.uint8)], Path("text"), "u1")
    train = ["train", "--data", "text", *OPTIONS, "--steps", "1"]
    assert main([*train, ref, "--out", "runs/a", "--lr", "1e-2"]) == 0
    assert main([*train, "--from", "runs/a", "--out", "runs/a"]) == 2
    assert (
        "this is the folder of the run itself, which continues with `megaloom train runs/a`" in capfd.readouterr().err
    )
    refused(ref, capfd)
    assert main([*train, "--from", "runs/a", "--lr", "1e-12"]) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert "weights from runs/a, step 1; the optimizer is fresh, and training starts at step 0" in said
    assert " train runs/from-a --data text" in said[said.index("to train further") :]
    before, after = weights(Path("runs/a"), ref), weights(Path("runs/from-a"), ref)
    assert before.keys() == after.keys()
    assert all(torch.allclose(x, after[name], rtol=0, atol=1e-11) for name, x in before.items())
    assert main(["pack", "runs/a", "-o", "a.megaloom"]) == 0
    packed(capfd)
    lora = [*train, ref, "--from", "a.megaloom", "--lora-rank", "2", "--lora-targets", "up_proj", "--lr", "1e-1"]
    assert main([*lora, "--out", "runs/lora"]) == 0
    merged, adapted = weights(Path("runs/lora"), ref), open_weights(Path("runs/lora")).of(find("runs/lora")[0])
    assert merged.keys() == before.keys() < adapted.keys()
    moved = [name for name, x in merged.items() if not torch.equal(x, before[name])]
    assert moved == ["mlp.0.up", "mlp.1.up"]


def refused(ref: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Models with other weights, or that compute something else of them, are refused."""
    for arguments, says in (
        ("ff=48", "its weights are not those of model 'tiny'\nmlp.0.up is [embed=32 ff=64], not [embed=32 ff=48]"),
        ("eps=1e-4", "is not the model of that run: eps of rms_norm.0 is 0.0001, not 1e-06"),
    ):
        start = ["train", ref, "--set", arguments, "--from", "runs/a", "--out", "runs/b", "--data", "text", *OPTIONS]
        assert main(start) == 2
        assert says in capfd.readouterr().err
    assert not Path("runs/b").exists()


def packed(capfd: pytest.CaptureFixture[str]) -> None:
    """A packed run writes the tokens of the run, and has its loss. Nothing stays unpacked."""
    written = []
    for run in ("runs/a", "a.megaloom"):
        asked = ["--prompt", "The", "--max-new-tokens", "2", "--tokenizer", "bytes", "--json"]
        assert main(["generate", run, *asked]) == 0
        written.append(json.loads(capfd.readouterr().out.splitlines()[-1])["tokens"])
    assert written[0] == written[1]
    assert main(["evaluate", "a.megaloom"]) == 0
    assert "a.megaloom, step 1, validation part" in capfd.readouterr().out
    assert main(["convert", "a.megaloom", "--to", "hf", "-o", "out"]) == 2
    assert "has no Hugging Face config" in capfd.readouterr().err
    with pytest.raises(UserError, match="is a packed run\nunpack it"):
        find("a.megaloom")
