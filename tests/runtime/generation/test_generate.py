"""`megaloom generate` on the command line: what it refuses."""

import json
from pathlib import Path

import pytest
import torch

from megaloom.runtime.cli.main import main
from tests.support.models.hugging_face import VOCAB, built


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a GPT-2 with 32 positions."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models") / "gpt2"
    built("gpt2").save_pretrained(path)
    return path


WRONG = [
    (["--prompt", "a"], f"token 97 of a prompt is beyond the vocabulary of gpt2, {VOCAB} tokens"),
    (["--prompt", " " * 32], "a prompt has 32 tokens, but gpt2 has 32 positions\ngive a shorter prompt"),
    (["--prompt", " ", "--max-new-tokens", "32"], "a prompt of 1 tokens and --max-new-tokens 32 are more than the 32"),
    (["--prompt", ""], "a prompt is empty, and the tokenizer has no token that begins a text"),
    (["--prompt", " ", "--tp", "3"], "--tp 3 does not divide heads=4\nuse --tp 1, 2, 4"),
    (["--prompt", " ", "--pp", "40"], "--pp 40 is more than the 21 layers of gpt2"),
    (["--prompt", " ", "--pp", "0"], "--pp must be at least 1, got 0"),
    (["--prompt", " ", "--eos-token-id", "61"], "--eos-token-id 61 is beyond the model's vocabulary of 61 tokens"),
    (["--prompt", " ", "--eos-token-id", "</s>"], "--eos-token-id '</s>' is not the id of a token"),
    (["--prompt", " ", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
    (["--prompt", " ", "--chat"], "--chat is given, and the tokenizer has no chat template"),
    (["--prompt", " ", "--tokenizer", "none"], "no tokenizer none"),
    (["--prompt-file", "none"], "cannot read the prompt in none: No such file or directory"),
    (["--prompt", " ", "--top-p", "2", "--do-sample"], "--top-p must be above 0 and at most 1, got 2"),
]


@pytest.mark.parametrize(("options", "says"), WRONG)
def test_wrong_input_is_refused(
    folder: Path, options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(folder), *options]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"megaloom: {says}")
    assert not shown.out


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("bert", "attention.0 of bert is not causal: tokens read later ones, so it writes no text"),
        ("vit", "vit predicts unembed.0 [batch vocab=2], not a token for each position, so it writes no text"),
        ("llava", "llava reads the input 'image' [batch channels=3 height=16 width=16], so text alone is not enough"),
    ],
)
def test_a_model_that_writes_no_text_is_refused(
    name: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    built(name).save_pretrained(tmp_path / name)
    assert main(["generate", str(tmp_path / name), "--prompt", " "]) == 2
    assert capsys.readouterr().err.startswith(f"megaloom: {says}")


def test_a_folder_without_a_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tmp_path), "--prompt", " "]) == 2
    assert capsys.readouterr().err.startswith(f"megaloom: {tmp_path} is not a run folder\ngive the folder that")


def test_sequences_are_printed_as_json(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Prompts of unequal lengths write together what each writes by itself, under another layout."""
    prompts = ["1 + 1", "2", "#9876 +"]
    options = ["--max-new-tokens", "4", "--num-beams", "2", "--json"]
    together = [word for prompt in prompts for word in ("--prompt", prompt)]
    assert main(["generate", str(folder), *together, *options, "--tp", "2", "--batch-size", "2"]) == 0
    found = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [x["prompt"] for x in found] == prompts
    assert {x["reason"] for x in found} == {"length"}
    assert main(["generate", str(folder), *together[2:4], *options]) == 0
    (alone,) = (json.loads(line) for line in capfd.readouterr().out.splitlines())
    assert alone["tokens"] == found[1]["tokens"]
    assert abs(alone["score"] - found[1]["score"]) < 1e-4
