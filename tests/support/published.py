"""A sample of the published runs of benchmarks/accuracy, and rows of the older schema."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from benchmarks.accuracy.records import LeftOut, RunRecord, run_of_record
from benchmarks.accuracy.run_files import shipped_records
from benchmarks.accuracy.training_run import TrainingRun
from tests.support.paths import TESTS

OLDER = TESTS / "data" / "older_schema_runs.jsonl"
IDS = (TESTS / "data" / "sample_run_ids.txt").read_text().split()


@cache
def sample_runs() -> dict[str, TrainingRun]:
    """Return the runs of the sample by id."""
    records = (shipped_records()[id] for id in IDS)
    return {record.id: run_of_record(record) for record in records if isinstance(record, RunRecord)}


def sample_reasons() -> dict[str, str]:
    """Return the reasons of the rows of the sample that are not predicted, by id."""
    records = (shipped_records()[id] for id in IDS)
    return {record.id: record.reason for record in records if isinstance(record, LeftOut)}


def older_rows() -> list[dict[str, Any]]:
    """Return the rows of the older schema."""
    return [json.loads(line) for line in OLDER.read_text().splitlines()]
