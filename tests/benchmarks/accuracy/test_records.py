"""The schema of published runs, and the data in the repository."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.accuracy.records import LeftOut, RunRecord, read_record, record_line, run_of_record
from benchmarks.accuracy.run_files import shipped_files, shipped_records
from benchmarks.accuracy.training_run import TrainingRun, UnfitError

RECORD = shipped_records()["simumax-005"]


def test_every_shipped_line_is_a_record_and_is_written_as_it_is_read() -> None:
    count = 0
    for path in shipped_files():
        for line in path.read_text(encoding="utf-8").splitlines():
            assert record_line(read_record(line)) == line
            count += 1
    assert count == len(shipped_records())  # ids are unique


def test_shipped_records_name_their_source_profile_and_measurement() -> None:
    for record in shipped_records().values():
        assert record.reference and record.source
        if isinstance(record, LeftOut):
            assert record.reason
        else:
            measured = record.measured
            assert measured.step_seconds or measured.memory_gib or measured.out_of_memory
            assert (measured.memory_gib is None) == (measured.memory_kind is None)


def run_of(row: dict[str, Any]) -> TrainingRun:
    record = read_record(json.dumps(row))
    assert isinstance(record, RunRecord)
    return run_of_record(record)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"devices": 3}, "the layout has 8 devices, and 3 were used"),
        ({"profile": "other"}, "unknown framework profile or feature 'other'"),
        ({"precision": "int4"}, "precision"),
        ({"global_batch": "8"}, "global_batch"),
        ({"colour": "red"}, "colour"),
        ({"decoder": None}, "no model: give decoder, hybrid or example"),
        ({"id": None}, "id"),
    ],
)
def test_a_wrong_record_says_which_field_is_wrong(change: dict[str, Any], reason: str) -> None:
    assert isinstance(RECORD, RunRecord)
    row = {**json.loads(record_line(RECORD)), **change}
    with pytest.raises(UnfitError, match=reason):
        run_of({key: value for key, value in row.items() if value is not None})


def test_a_record_may_name_an_example() -> None:
    row = json.loads(record_line(RECORD))
    del row["decoder"]
    run = run_of({**row, "example": "mixtral-8x7b"})
    assert run.sparse and run.model.name == "mixtral-8x7b"
