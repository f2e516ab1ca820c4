"""The options --data and --split: blends, parts, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megaloom.dsl.errors import UserError
from megaloom.runtime.data import integrity
from megaloom.runtime.data.corpus import Blend, open_corpus, parse_blend
from megaloom.runtime.data.description import Description, read_description, write_description
from megaloom.runtime.data.indexed import path_of, write_indexed
from megaloom.runtime.data.integrity import tokenizer_digest, tokens_digest
from megaloom.runtime.data.token_ids import BYTE_IDS, TokenIds
from megaloom.runtime.data.tokenizer import train_bpe

IDS = TokenIds(258, eos=0, name="out-tokenizer")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the datasets a and b of one tokenizer, c of another, m of Megatron-LM, and a text."""
    monkeypatch.chdir(tmp_path)
    for name, text, count in (("a", "ab", 100), ("b", "ab", 200), ("c", "cd", 50), ("m", "", 30)):
        data = write_indexed((np.full(10, i) for i in range(count)), tmp_path / name, "u2")
        if text:
            train_bpe([text] * 9, 258, tmp_path / f"{name}-tokenizer")
            tokenizer, tokens = tokenizer_digest(f"{name}-tokenizer"), tokens_digest(data.prefix)
            counts = {"documents": count, "tokens": data.tokens, "tokens_digest": tokens}
            description = Description(digest=name, sources=(name,), ids=IDS, tokenizer=tokenizer, **counts)
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
    for suffix in (".bin", ".idx", ".json", "-tokenizer"):
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


def _other_tokens(folder: Path) -> None:
    path = folder / "a.bin"
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)


def _of_an_earlier_version(folder: Path, **changes: object) -> None:
    """Leave out the checksums of a description, which earlier versions did not write, and change fields."""
    fields = json.loads((folder / "a.json").read_text())
    kept = {k: v for k, v in fields.items() if k not in ("checksum", "tokens_digest")}
    (folder / "a.json").write_text(json.dumps(kept | changes))


CHANGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "files of two datasets": (
        lambda p: [(p / f"a{x}").write_bytes((p / f"b{x}").read_bytes()) for x in (".bin", ".idx")],
        r"a.idx has 2,000 tokens, its description says 1,000\nthe files are of two",
    ),
    "tokens": (_other_tokens, r"a.bin has changed since a.json was written\ncopy all files of the dataset again"),
    "description": (
        lambda p: (p / "a.json").write_text((p / "a.json").read_text().replace("258", "200")),
        r"a.json has changed since it was written\ncopy the files",
    ),
    "ids": (
        lambda p: _of_an_earlier_version(p, ids={"vocab": 1, "eos": 0, "name": "a-tokenizer"}),
        r"a.json has other ids than the tokenizer .*a-tokenizer\n",
    ),
    "documents": (
        lambda p: _of_an_earlier_version(p, documents=-200),
        r"a.idx has 100 documents, its description says -200\n",
    ),
    "digest of the tokenizer": (
        lambda p: _of_an_earlier_version(p, tokenizer="0"),
        r"a-tokenizer is not the tokenizer that made a: its files have changed\n",
    ),
    "tokenizer": (
        lambda p: (p / "a-tokenizer" / "tokenizer.json").write_text(""),
        r"a-tokenizer is not the tokenizer that made a: its files have changed\n",
    ),
    "no tokenizer": (
        lambda p: shutil.rmtree(p / "a-tokenizer"),
        r"a-tokenizer is missing: the tokenizer that made a\ncopy",
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_files_that_do_not_belong_together_are_refused(case: str, folder: Path) -> None:
    change, message = CHANGED[case]
    change(folder)
    with pytest.raises(UserError, match=message):
        open_corpus(["a"], None, folder)


def test_a_dataset_of_an_earlier_version_is_read(folder: Path) -> None:
    before = open_corpus(["a"], None, folder).digest
    _of_an_earlier_version(folder)
    assert open_corpus(["a"], None, folder).digest == before


def test_of_a_large_file_blocks_are_compared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrity, "WHOLE_NBYTES", 1024)
    monkeypatch.setattr(integrity, "DIGEST_BLOCKS", 4)
    before = tokens_digest(folder / "b")
    data = bytearray((folder / "b.bin").read_bytes())
    for at, seen in ((0, True), (300, False), (len(data) - 1, True)):
        changed = data.copy()
        changed[at] ^= 1
        (folder / "b.bin").write_bytes(changed)
        assert (tokens_digest(folder / "b") != before) is seen


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
