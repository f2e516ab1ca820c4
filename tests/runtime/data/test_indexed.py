"""Indexed datasets: megatron-core reads ours, we read theirs, splits agree, and damaged files are named."""

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from megaloom.dsl.errors import UserError
from megaloom.runtime.data.indexed import open_indexed, path_of, smallest_token_type, write_indexed
from megaloom.runtime.data.split import SplitUnit, parse_split, split_ranges
from megaloom.runtime.megatron import device

device.prepare()

from megatron.core.datasets.blended_megatron_dataset_config import (  # noqa: E402
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset  # noqa: E402
from megatron.core.datasets.indexed_dataset import IndexedDataset as MegatronDataset  # noqa: E402
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder  # noqa: E402
from megatron.core.datasets.masked_dataset import MaskedWordPieceDataset  # noqa: E402

DOCUMENTS = [np.array(d) for d in ([5, 6, 7], [250], [1, 2, 3, 4], [0, 255])]


@pytest.mark.parametrize("token_type", ["u1", "i1", "i2", "u2", "i4", "i8"])
def test_megatron_core_reads_ours(token_type: str, tmp_path: Path) -> None:
    documents = [d % 128 for d in DOCUMENTS]
    write_indexed(documents, tmp_path / "ours.v1", token_type)
    theirs = MegatronDataset(str(tmp_path / "ours.v1"))
    assert len(theirs) == 4
    assert theirs.index.dtype().itemsize == int(token_type[1])
    assert [theirs[i].tolist() for i in range(4)] == [d.tolist() for d in documents]
    assert theirs.document_indices.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.int64, np.uint8])
def test_we_read_theirs(kind: type, tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=kind)
    for document in DOCUMENTS:
        builder.add_document(torch.from_numpy(document), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    ours = open_indexed(tmp_path / "theirs")
    ours.check()
    assert (ours.documents, ours.sequences, ours.tokens) == (4, 4, 10)
    assert [ours.document(i).tolist() for i in range(4)] == [d.tolist() for d in DOCUMENTS]
    assert isinstance(ours.array, np.memmap)
    copy = pickle.loads(pickle.dumps(ours))
    assert copy == ours
    assert copy.array.tolist() == ours.array.tolist()


def test_documents_of_several_sequences_are_read(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.int32)
    builder.add_document(torch.arange(7), [3, 4])
    builder.add_document(torch.arange(7, 9), [2])
    builder.finalize(str(tmp_path / "theirs.idx"))
    ours = open_indexed(tmp_path / "theirs")
    ours.check()
    assert (ours.documents, ours.sequences) == (2, 3)
    assert [ours.document(i).tolist() for i in range(2)] == [list(range(7)), [7, 8]]
    assert ours.documents_of(2, 9).tolist() == [0, 0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("split", ["969,30,1", "95,5", "1,1,1", "99.5,0.3,0.2", "100"])
@pytest.mark.parametrize("count", [3, 10, 997])
def test_splits_are_megatron_cores(split: str, count: int, tmp_path: Path) -> None:
    data = write_indexed((np.array([i]) for i in range(count)), tmp_path / "x", "i4")
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    theirs = [(0, 0) if s is None else (round(s[0] * float(count)), round(s[1] * float(count))) for s in matrix]
    ours = [(r.start, r.stop) if r.count else (0, 0) for r in split_ranges(data, parse_split(split))]
    assert ours == [(a, b) if b > a else (0, 0) for a, b in theirs]


@pytest.mark.parametrize("split", ["969,30,1", "8,1,1"])
def test_documents_of_several_sequences_are_split_as_by_megatron_core(split: str, tmp_path: Path) -> None:
    """By sequences for GPT, by documents for BERT and T5: as many units as megatron-core's classes count."""
    builder = IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=np.int32)
    for i in range(40):
        lengths = [1 + (i * k) % 5 for k in range(1, 2 + i % 4)]
        builder.add_document(torch.arange(sum(lengths)), lengths)
    builder.finalize(str(tmp_path / "x.idx"))
    ours, low = open_indexed(tmp_path / "x"), MegatronDataset(str(tmp_path / "x"))
    ends = np.concatenate([[0], np.cumsum(low.sequence_lengths)])
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    for unit, theirs, firsts in (
        (SplitUnit.SEQUENCES, GPTDataset, np.arange(len(ends))),
        (SplitUnit.DOCUMENTS, MaskedWordPieceDataset, low.document_indices),
    ):
        count = theirs.numel_low_level_dataset(low)
        borders = [(round(s[0] * float(count)), round(s[1] * float(count))) for s in matrix if s]
        expected = [(int(ends[firsts[a]]), int(ends[firsts[b]])) for a, b in borders]
        assert [(r.start, r.stop) for r in split_ranges(ours, parse_split(split), unit)] == expected


def test_types_of_tokens() -> None:
    assert [smallest_token_type(n) for n in (256, 257, 65499, 65500)] == ["u1", "u2", "u2", "i4"]


def _cut(path: Path, nbytes: int) -> None:
    path.write_bytes(path.read_bytes()[:nbytes])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda p: path_of(p, ".bin").unlink(),
            r"cannot read .*x.bin: No such file.*\nan indexed dataset is x.bin",
        ),
        (lambda p: path_of(p, ".idx").unlink(), r"cannot read .*x.idx: No such file"),
        (
            lambda p: _cut(path_of(p, ".bin"), 11),
            r"x.bin has 11 bytes; x.idx says 10 tokens of 2 bytes\none of",
        ),
        (lambda p: _cut(path_of(p, ".idx"), 60), r"x.idx has 60 bytes; its 4 sequences need 122\nthe file is damaged"),
        (lambda p: _cut(path_of(p, ".idx"), 20), r"x.idx is not the index of a Megatron dataset"),
        (lambda p: path_of(p, ".idx").write_text("x" * 200), r"x.idx is not the index of a Megatron dataset"),
        (lambda p: shutil.copy(path_of(p, ".bin"), path_of(p, ".mask")), r"x.mask has 20 bytes for 10 tokens"),
    ],
)
def test_damaged_files_are_named(damage: object, message: str, tmp_path: Path) -> None:
    write_indexed(DOCUMENTS, tmp_path / "x", "u2")
    damage(tmp_path / "x")  # type: ignore[operator]
    with pytest.raises(UserError, match=message):
        open_indexed(tmp_path / "x")


def test_sequences_out_of_order_are_refused(tmp_path: Path) -> None:
    data = write_indexed(DOCUMENTS, tmp_path / "x", "u2")
    raw = bytearray(path_of(data.prefix, ".idx").read_bytes())
    raw[34:38], raw[38:42] = raw[38:42], raw[34:38]  # the lengths of two documents
    path_of(data.prefix, ".idx").write_bytes(raw)
    with pytest.raises(UserError, match=r"x.idx has sequences that overlap or leave gaps\nthe file is damaged"):
        open_indexed(data.prefix).check()
