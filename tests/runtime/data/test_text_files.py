"""Text files as bytes: no byte of a file is both trained on and held out, and what is no text is named."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from megaloom.dsl.errors import UserError
from megaloom.runtime.data import text_files
from megaloom.runtime.data.data_split import DataSplit
from megaloom.runtime.data.documents import open_source
from megaloom.runtime.data.split import TokenRange
from megaloom.runtime.data.text_files import HELD_OUT, gather, split_files


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Forty small files, each a run of one letter, so that a byte says which file it came from."""
    root = tmp_path / "text"
    (root / "inner").mkdir(parents=True)
    for i in range(40):
        (root / ("inner" if i % 2 else ".") / f"{i}.txt").write_bytes(bytes([40 + i]) * (100 + i))
    return root


def test_split_is_by_file(library: Path, tmp_path: Path) -> None:
    corpus = gather(str(library), tmp_path / "run")
    trained, held_out = (set(np.unique(part.array)) - {0} for part in (corpus.train, corpus.held_out))
    assert not trained & held_out
    assert trained | held_out == set(range(40, 80))
    assert corpus.files == 40
    assert 1 <= len(held_out) <= 8
    for part in (corpus.train, corpus.held_out):
        assert part.array.size == part.tokens == sum(101 + b - 40 for b in np.unique(part.array).tolist() if b)


def test_a_text_file_larger_than_a_quarter_of_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "host_memory", lambda: 4 * 2**20)
    (tmp_path / "large.jsonl").write_bytes(b'{"text": "a"}\n' * 100_000)
    assert open_source(str(tmp_path)).chunks  # read line by line
    (tmp_path / "large.txt").write_bytes(b"a" * (2**20 + 1))
    for read in (open_source, lambda source: gather(source, tmp_path / "run")):
        with pytest.raises(UserError, match=r"large.*\ngive several files, or JSONL"):
            read(str(tmp_path))
    assert not (tmp_path / "run").exists()


def test_a_new_file_moves_no_other(tmp_path: Path) -> None:
    names = [f"{i}.txt" for i in range(400)]
    for name in [*names, "new.txt"]:
        (tmp_path / name).write_text("x")
    held_out = {piece.path.name for piece in split_files(tmp_path, names)[1]}
    assert 0.5 * HELD_OUT < len(held_out) / len(names) < 2 * HELD_OUT
    assert {piece.path.name for piece in split_files(tmp_path, [*names, "new.txt"])[1]} - {"new.txt"} == held_out


@pytest.mark.parametrize("count", [2, 3])
def test_few_files_still_leave_one_on_each_side(tmp_path: Path, count: int) -> None:
    names = [f"{i}.txt" for i in range(count)]
    for name in names:
        (tmp_path / name).write_text("x")
    train, held_out = split_files(tmp_path, names)
    assert train
    assert held_out
    assert {p.path for p in train}.isdisjoint({p.path for p in held_out})


def test_a_single_file_is_cut_in_two(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_bytes(bytes(range(1, 201)))
    corpus = gather(str(tmp_path / "book.txt"), tmp_path / "run")
    assert corpus.train.array.tolist() == [*range(1, 191), 0]
    assert corpus.held_out.array.tolist() == [*range(191, 201), 0]


def test_gathered_once_until_a_file_changes(library: Path, tmp_path: Path) -> None:
    first = gather(str(library), tmp_path / "run")
    train = tmp_path / "run" / "train.bin"
    written = train.stat().st_mtime_ns
    assert gather(str(library), tmp_path / "run") == first
    assert train.stat().st_mtime_ns == written
    (library / "0.txt").write_bytes(b"changed")
    assert gather(str(library), tmp_path / "run").digest != first.digest
    assert not list((tmp_path / "run").glob("*.tmp"))


@pytest.mark.parametrize(
    ("name", "left"), [("train.bin", b"x"), ("held_out.bin", None), ("data.json", b"null"), ("train.idx", b"")]
)
def test_a_damaged_copy_is_made_anew(library: Path, tmp_path: Path, name: str, left: bytes | None) -> None:
    first = gather(str(library), tmp_path)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).unlink()
    if left is not None:
        (tmp_path / name).write_bytes(left)
    assert gather(str(library), tmp_path) == first
    assert (tmp_path / name).read_bytes() == whole


def test_hidden_and_binary_files_are_no_text(library: Path, tmp_path: Path) -> None:
    (library / ".git").mkdir()
    (library / ".git" / "config").write_text("hidden")
    (library / "image.png").write_bytes(b"\x89PNG\0\0")
    (library / "empty.txt").write_bytes(b"")
    assert gather(str(library), tmp_path / "run").files == 40


def test_what_runs_write_is_no_text(library: Path, tmp_path: Path) -> None:
    first = gather(str(library), library / "runs" / "one" / "data")
    for name in (".lock", "plan.json"):
        (library / "runs" / "one" / name).write_text("{}")
    again = gather(str(library), library / "runs" / "one" / "data")
    assert (again.digest, again.files) == (first.digest, first.files)


def test_the_standard_library_is_text_enough(tmp_path: Path) -> None:
    corpus = gather("stdlib", tmp_path)
    assert corpus.train.tokens > 10_000_000
    assert 0.02 < corpus.held_out.tokens / corpus.train.tokens < 0.1
    assert (
        2.8 < DataSplit("held-out", (TokenRange(corpus.held_out, 0, corpus.held_out.tokens),)).unigram_entropy() < 3.6
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: root / "nowhere", "no file or folder .*nowhere\ngive a file or a folder"),
        (lambda root: root, r"no UTF-8 text in .*empty \(1 file: 1 empty\)"),
    ],
)
def test_missing_and_empty_data_are_refused(tmp_path: Path, make: object, message: str) -> None:
    root = tmp_path / "empty"
    root.mkdir()
    (root / "nothing.txt").touch()
    with pytest.raises(UserError, match=message):
        gather(str(make(root)), tmp_path / "run")  # type: ignore[operator]


def test_files_that_are_not_text_are_counted_by_kind(tmp_path: Path) -> None:
    root = tmp_path / "notes"
    root.mkdir()
    (root / "nothing.txt").touch()
    (root / "letter.txt").write_text("Dear reader", "utf-16")
    (root / "memory").symlink_to("/proc/self/mem")  # a regular file that cannot be read at 0
    with pytest.raises(UserError, match=r"^no UTF-8 text in .*notes \(3 files: .*\)$") as raised:
        gather(str(root), tmp_path / "run")
    assert {"1 unreadable", "1 UTF-16", "1 empty"} == set(str(raised.value).partition("files: ")[2][:-1].split(", "))
    (root / "text.txt").write_text("Dear reader")
    with pytest.raises(UserError, match=r"^cannot read .*notes: "):  # text is there, but not all of it
        gather(str(root), tmp_path / "run")


def test_hidden_files_and_folders_that_cannot_be_listed_are_named(tmp_path: Path, monkeypatch) -> None:
    root = tmp_path / "notes"
    (root / ".cache").mkdir(parents=True)
    (root / ".secret").write_text("hidden")
    with pytest.raises(UserError, match=r"no UTF-8 text in .*notes \(2 files: 2 hidden\)"):
        gather(str(root), tmp_path / "run")
    (root / "text.txt").write_text("Dear reader")
    (root / "inner").mkdir()
    scan = os.scandir

    def scandir(path: str) -> object:  # root may list everything, so that a mode does not help
        if str(path).endswith("inner"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match=r"^cannot read .*notes: Permission denied: .*notes/inner$"):
        gather(str(root), tmp_path / "run")
    assert not (tmp_path / "run").exists()
