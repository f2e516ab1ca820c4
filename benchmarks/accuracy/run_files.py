"""Files of published runs: those of the folder `data`, and files of the user.

`read_runs(path)` gives the runs of a file, and for every other row the reason why it is not predicted. A line of a
file is a record (see `records`) or a row of the older schema (see `published`).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_file import parse_json

from .published import published_record
from .records import LeftOut, RunRecord, read_record, run_of_record
from .row_values import row_text
from .training_run import Skipped, TrainingRun, UnfitError

DATA = Path(__file__).with_name("data")
FITTED_FROM = ("published_runs", "megatron_functional_runs", "vtrain_a100_runs")  # some constants were fitted to these
OTHER_RUNS = "other_runs"  # no constant was fitted to these
EXPECTED = "a file of JSON lines, each a record of a training run (docs/accuracy/data.md has the fields)"


def shipped_files() -> tuple[Path, ...]:
    """Return all files of published runs in the folder `data`."""
    return tuple(DATA / f"{name}.jsonl" for name in (*FITTED_FROM, OTHER_RUNS))


def fitted_files() -> tuple[Path, ...]:
    """Return the shipped files to which some constants were fitted: all but the runs that were collected later."""
    return tuple(DATA / f"{name}.jsonl" for name in FITTED_FROM)


@cache
def shipped_records() -> dict[str, RunRecord | LeftOut]:
    """Return the shipped records by id."""
    lines = (line for path in shipped_files() for line in path.read_text(encoding="utf-8").splitlines())
    records = map(read_record, lines)
    return {record.id: record for record in records}


def read_runs(path: str | Path) -> tuple[list[TrainingRun], list[Skipped]]:
    """Return the runs of a file, and the rows that are not predicted. Raises UserError for a file without rows."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read runs from {path}: {error.strerror}\ngive {EXPECTED}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text\ngive {EXPECTED}") from None
    lines = [line for line in text.splitlines() if line.strip()]
    if not any(map(_is_object, lines)):
        raise UserError(f"{path} has no rows of training runs\ngive {EXPECTED}")
    runs: list[TrainingRun] = []
    skipped: list[Skipped] = []
    for number, line in enumerate(lines, 1):
        run = _read_line(line, f"row {number}")
        if isinstance(run, TrainingRun):
            runs.append(run)
        else:
            skipped.append(run)
    return runs, skipped


def _read_line(line: str, name: str) -> TrainingRun | Skipped:
    """Return the run of a line, or the reason why it is none."""
    row: dict[str, Any] = {"id": name}
    try:
        row |= _object(line)
        if isinstance(row.get("layout"), dict) or "reason" in row:
            record = read_record(line)
        else:
            record = published_record(row, shipped_records())
        if isinstance(record, RunRecord):
            return run_of_record(record)
        moe, reason = record.mixture_of_experts, record.reason
        return Skipped(record.id, record.source, record.gpu, record.precision, moe, reason)
    except (UnfitError, UserError) as error:
        reason = str(error).partition("\n")[0]
    source = row_text(row, "source_group") or row_text(row, "source")
    precision = row_text(row, "precision_class") or row_text(row, "precision")
    sparse = bool(row.get("experts") or row.get("mixture_of_experts"))
    return Skipped(row_text(row, "id"), source, row_text(row, "gpu"), precision, sparse, reason)


def _object(line: str) -> dict[str, Any]:
    """Parse a line as a JSON object without its null fields."""
    try:
        row = parse_json(line)
    except ValueError as error:
        raise UnfitError(f"it is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise UnfitError(f"it is not a JSON object: {line:.40}")
    return {key: value for key, value in row.items() if value is not None}


def _is_object(line: str) -> bool:
    try:
        return bool(_object(line))
    except UnfitError:
        return False
