"""Training runs that others published, read from files.

Protocol: `read(path)` gives the runs of a file and, of the rows that are none, the reason. Three formats are known, by
their columns: JSON lines of published runs, the sweeps of vTrain, and the peak memory of Megatron-LM's own tests. A row
says what was run, never how quick it should be: nothing here depends on what was measured.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megaloom.dsl.errors import UserError

from .functional_tests import functional, hardware, precision
from .published import published
from .run import (
    Row,
    Run,
    Skipped,
    UnfitError,
    text,
)
from .vtrain import vtrain

KNOWN = "JSON lines of published runs, and tables that begin with params,gpus,… or suite, test, …"
Rows = tuple[list[Any], Callable[[Any], Row], Callable[[Row], Run]]  # as written, what parses one, what reads it


def read(path: str | Path) -> tuple[list[Run], list[Skipped]]:
    """The runs of a file, and the rows that are left out. Raises UserError for a file that has none of the formats."""
    try:
        written = Path(path).read_text(encoding="utf-8-sig")
        rows, parse, reader = _rows(written, str(path))
    except OSError as error:
        raise UserError(f"cannot read runs from {path}: {error.strerror}\ngive a file of runs: {KNOWN}") from None
    except (UnicodeDecodeError, csv.Error):
        raise UserError(f"{path} is no text of lines\ngive a file of runs: {KNOWN}") from None
    runs: list[Run] = []
    skipped: list[Skipped] = []
    for i, raw in enumerate(rows, 1):
        row: Row = {"id": f"row {i}"}
        try:
            row = {**row, **parse(raw)}
            runs.append(reader(row))
        except (UnfitError, UserError) as error:
            skipped.append(_skipped(row, str(error).partition("\n")[0]))
    return runs, skipped


def _skipped(row: Row, reason: str) -> Skipped:
    name, source, gpu, precision = (text(row, key) for key in ("id", "source_group", "gpu", "precision_class"))
    return Skipped(name, source, gpu, precision, bool(row.get("experts")), reason)


def _rows(written: str, where: str) -> Rows:
    """The rows of a file, and what reads them."""
    lines = [line for line in written.splitlines() if line.strip()]
    head = lines[0] if lines else ""
    if head.startswith("{") and any(map(_readable, lines)):
        return lines, _object, published
    if head.startswith("params,gpus,"):
        source = {"source_group": "vtrain", "gpu": "A100-80GB", "precision_class": "fp16"}
        numbered = ({"id": f"vtrain-{i:03}", **row} for i, row in enumerate(csv.DictReader(lines), 1))
        return list(numbered), lambda row: {**source, **row}, vtrain
    if head.startswith("suite\ttest\t"):
        table = csv.DictReader(lines, delimiter="\t")
        return list(table), _test, functional
    raise UserError(f"{where} holds no runs that are known\nknown are {KNOWN}")


def _object(line: str) -> Row:
    """A line of JSON."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UnfitError(f"it is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise UnfitError(f"{line:.40} is no JSON object")
    return {key: value for key, value in row.items() if value is not None}


def _readable(line: str) -> bool:
    try:
        return bool(_object(line))
    except UnfitError:
        return False


def _test(row: Row) -> Row:
    """A line of the table of tests."""
    said = {"id": f"{text(row, 'test')}/{text(row, 'hw')}", "gpu": hardware(row), "precision_class": precision(row)}
    return {"source_group": "megatron-functional", **row, **said}
