"""Weights on the command line: `megaloom train --from`."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megaloom.runtime.cli.main import main
from tests.support.hugging_face import built

OPTIONS = ("--devices", "1", "--seq", "16", "--batch", "2", "--steps", "1")


def test_wrong_weights_are_refused_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "llama"
    built("llama", vocab_size=300).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert main(["train", "--from", str(folder), "--out", str(tmp_path / "run"), *OPTIONS]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"megaloom: --from {folder}: the tensors of the checkpoint are not those of model 'llama'",
        "missing: lm_head.weight [300, 32], which holds head",
    ]
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
