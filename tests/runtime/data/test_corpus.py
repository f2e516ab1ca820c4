"""The options --data and --split: blends, parts, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

from megaloom.dsl.errors import UserError
from megaloom.runtime.data.corpus import Blend, open_corpus, parse_blend
from megaloom.runtime.data.description import Description, read_description, write_description
from megaloom.runtime.data.indexed import path_of, write_indexed
from megaloom.runtime.data.token_ids import BYTE_IDS, TokenIds

IDS = TokenIds(300, eos=0, name="out-tokenizer")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the datasets a and b of one tokenizer, c of another, m of Megatron-LM, and a text."""
    monkeypatch.chdir(tmp_path)
    for name, count in (("a", 100), ("b", 200), ("c", 50), ("m", 30)):
        data = write_indexed((np.full(10, i) for i in range(count)), tmp_path / name, "u2")
        description = Description(
            digest=name, sources=(name,), documents=count, tokens=data.tokens, ids=IDS, tokenizer=str(name == "c")
        )
        if name != "m":
            write_description(description, data.prefix)
    (tmp_path / "text.txt").write_text("Dear reader, " * 50)
    return tmp_path


def test_sources_and_weights(folder: Path) -> None:
    assert parse_blend(["a", "b"]) == Blend(("a", "b"), None)
    assert parse_blend(["0.3", "a", "7", "b"]) == Blend(("a", "b"), (0.3, 7.0))
    assert parse_blend(["1", "a"]) == Blend(("a",), None)
    (folder / "2024").mkdir()
    assert parse_blend(["2024", "a"]) == Blend(("2024", "a"), None)  # a folder, not a weight


def test_parts_of_a_blend(folder: Path) -> None:
    corpus = open_corpus(["3", "a", "1", "b.bin"], "90,10", folder / "run")
    assert [(r.start, r.stop) for r in corpus.train.ranges] == [(0, 900), (0, 1800)]
    assert corpus.train.weights == (3.0, 1.0)
    assert corpus.validation is not None
    assert [(r.start, r.stop) for r in corpus.validation.ranges] == [(900, 1000), (1800, 2000)]
    assert corpus.test is None
    assert (corpus.ids, corpus.ids.unit) == (IDS, "token")
    assert not (folder / "run").exists()  # nothing is copied
    assert corpus.digest != open_corpus(["1", "a", "1", "b"], "90,10", folder / "run").digest


def test_the_digest_follows_the_contents_not_the_folder(folder: Path) -> None:
    before = open_corpus(["a"], None, folder).digest
    for suffix in (".bin", ".idx", ".json"):
        path_of(folder / "a", suffix).rename(folder / f"moved{suffix}")
    assert open_corpus(["moved"], None, folder).digest == before


def test_a_dataset_of_megatron_is_searched_for_its_largest_id(folder: Path) -> None:
    corpus = open_corpus(["m"], None, folder)
    assert (corpus.ids.vocab, corpus.ids.eos, corpus.tokenizer) == (30, None, None)


def test_text_is_bytes(folder: Path) -> None:
    corpus = open_corpus(["text.txt"], None, folder / "run")
    assert corpus.ids == BYTE_IDS
    assert corpus.ids.unit == "byte"
    assert corpus.validation is not None
    assert corpus.train.count + corpus.validation.count == 50 * 13 + 2


@pytest.mark.parametrize(
    ("words", "split", "message"),
    [
        (["0.3", "a", "b"], None, r"--data 0.3 a b is not a blend\ngive a weight before each dataset"),
        (["a", "0.3"], None, r"--data a 0.3 is not a blend"),
        (["-1", "a", "1", "b"], None, r"has a weight that is not above 0\nleave that dataset out"),
        ([], None, r"--data names nothing"),
        (["a", "c"], None, r"c and a were made with different tokenizers\ngive datasets of one tokenizer"),
        (
            ["a", "text.txt"],
            None,
            r"--data text.txt is not an indexed dataset; .*\ntokenize it: megaloom data text.txt -o",
        ),
        (["a", "nowhere"], None, r"no file, folder or indexed dataset nowhere\ngive --data prefixes"),
        (["nowhere"], None, r"no file or folder nowhere\ngive a file"),
        (["text.txt"], "9,1", r"--split 9,1 is for indexed datasets; of text files, a hash"),
        (["a"], "x", r"--split x is not a split\ngive the shares of training, validation and test: --split 969,30,1"),
    ],
)
def test_what_is_refused(folder: Path, words: list[str], split: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_corpus(words, split, folder / "run")
    assert not (folder / "run").exists()


def test_files_of_two_datasets_are_refused(folder: Path) -> None:
    for suffix in (".bin", ".idx"):
        path_of(folder / "a", suffix).write_bytes(path_of(folder / "b", suffix).read_bytes())
    with pytest.raises(UserError, match=r"a.idx has 2,000 tokens, its description says 1,000\nthe files are of two"):
        open_corpus(["a"], None, folder)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ("{", r"a.json does not describe a dataset\nremove it"),
        ('{"version": 1}', r"a.json does not describe a dataset"),
        ('{"version": 9}', r"a.json has version 9; this megaloom reads version 1"),
    ],
)
def test_a_damaged_description_is_named(folder: Path, contents: str, message: str) -> None:
    (folder / "a.json").write_text(contents)
    with pytest.raises(UserError, match=message):
        read_description(folder / "a")


def test_a_dataset_without_tokens_is_refused(folder: Path) -> None:
    write_indexed([], folder / "empty", "u2")
    with pytest.raises(UserError, match=r"empty.bin is empty\ngive a dataset with tokens"):
        open_corpus(["empty"], None, folder)
