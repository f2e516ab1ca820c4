"""`megaloom data` and `megaloom evaluate`: output, and one message with exit code 2 for bad input."""

from pathlib import Path

import pytest

from megaloom.runtime.cli.main import main
from megaloom.runtime.data.indexed import open_indexed


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "b.txt").write_text("three")
    return tmp_path


def test_several_sources_become_one_dataset(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data", "a.jsonl", "books", "-o", "out/all", "--tokenizer", "bytes", "--append-eos", "--workers", "1"]
    assert not main(words)
    out, err = capsys.readouterr()
    assert out == (
        "out/all.bin is written: 3 documents, 14 tokens, vocabulary 256\n"
        "train on it with: megaloom train --data out/all\n"
    )
    assert err == ""
    assert open_indexed(folder / "out" / "all").array.tobytes() == b"one\0two\0three\0"
    assert not main(words)
    assert capsys.readouterr().out.startswith("out/all.bin is complete already: 3 documents")
    assert main([*words[:-3], "--workers", "1"]) == 2  # without --append-eos
    assert (
        "out/all.idx exists, made of other sources or with other options\nchoose another -o" in capsys.readouterr().err
    )


def test_a_trained_vocabulary_that_is_smaller_than_asked_for_says_why(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not main(["data", "books", "-o", "out", "--train-vocab", "300", "--workers", "1"])
    shown = capsys.readouterr().out
    assert "the tokenizer has fewer tokens than --train-vocab 300: the text has no more pairs to join\n" in shown
    assert "train on it with: megaloom train --set vocab=261 --data out, or a MODEL with a vocabulary of 261" in shown
    assert main(["train", "--data", "out"]) == 2  # before a plan is searched
    out, err = capsys.readouterr()
    assert "stdlib-gpt has a vocabulary of 256; the data's tokenizer has 261 tokens (out-tokenizer)\n" in err
    assert "--set vocab=261" in err
    assert (out, (folder / "runs").exists()) == ("", False)
    assert not main(["data", "books", "-o", "least", "--train-vocab", "257", "--workers", "1"])
    assert "fewer tokens" not in capsys.readouterr().out


BAD: dict[str, tuple[list[str], str]] = {
    "no source": (["data", "-o", "out"], "source is missing\n`megaloom data --help` lists the options"),
    "no output": (["data", "a.jsonl"], "-o is missing"),
    "no tokenizer": (["data", "a.jsonl", "-o", "out"], "give one of --tokenizer FILE_OR_FOLDER, --tokenizer bytes"),
    "missing source": (["data", "nowhere", "-o", "out", "--tokenizer", "bytes"], "no file or folder nowhere"),
    "folder as prefix": (
        ["data", "a.jsonl", "-o", "books", "--tokenizer", "bytes"],
        "-o books is a folder\ngive a",
    ),
    "wrong key": (
        ["data", "a.jsonl", "-o", "out", "--tokenizer", "bytes", "--key", "body", "--workers", "1"],
        "a.jsonl, line 1, has no 'body': give --key one of text",
    ),
    "no run": (["evaluate", "books", "--data", "a.jsonl"], "books is not a run folder: it has no plan.json"),
    "no run and no data": (["evaluate", "books"], "books is not a run folder: it has no plan.json"),
    "blend": (["train", "--data", "0.5", "books", "a.jsonl"], "--data 0.5 books a.jsonl is not a blend\ngive a weight"),
    "split of text": (["train", "--data", "books", "--split", "9,1"], "--split 9,1 is for indexed datasets"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_message(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, message = BAD[case]
    before = sorted(folder.rglob("*"))
    assert main(words) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("megaloom: ")
    assert "Traceback" not in err
    if words[0] != "train":  # whose run folder has its lock
        assert sorted(folder.rglob("*")) == before
