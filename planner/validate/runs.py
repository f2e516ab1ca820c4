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

from megaloom.dsl.errors import UserError

from .published import published
from .run import Row, Run, Skipped, UnfitError
from .tables import vtrain
from .tested import functional

KEYS = ("id", "source_group", "gpu", "precision_class")


def read(path: str | Path) -> tuple[list[Run], list[Skipped]]:
    """The runs of a file, and the rows that are left out. Raises UserError for a file that has none of the formats."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read runs from {path}: {error}") from error
    rows, reader = _rows(text, str(path))
    runs: list[Run] = []
    skipped: list[Skipped] = []
    for row in rows:
        try:
            runs.append(reader(row))
        except (UnfitError, UserError) as error:
            reason = str(error).partition("\n")[0]
            name, source, gpu, precision = (str(row.get(key) or "") for key in KEYS)
            skipped.append(Skipped(name, source, gpu, precision, bool(row.get("experts")), reason))
    return runs, skipped


def _rows(text: str, where: str) -> tuple[list[Row], Callable[[Row], Run]]:
    """The rows of a file, and what reads them."""
    head = text.partition("\n")[0]
    if head.startswith("{"):
        try:
            rows: list[Row] = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise UserError(f"{where} is not JSON lines: {error}") from error
        return [{"id": f"row {i + 1}", **row} for i, row in enumerate(rows)], published
    if head.startswith("params,gpus,"):
        source = {"source_group": "vtrain", "gpu": "A100-80GB", "precision_class": "fp16"}
        table = csv.DictReader(text.splitlines())
        return [{**source, "id": f"vtrain-{i + 1:03}", **r} for i, r in enumerate(table)], vtrain
    if head.startswith("suite\ttest\t"):
        table = csv.DictReader(text.splitlines(), delimiter="\t")
        source = {"source_group": "megatron-functional"}
        return [{**source, **r, "id": f"{r['test']}/{r['hw']}", "gpu": str(r["hw"])} for r in table], functional
    raise UserError(
        f"{where} holds no runs that are known\n"
        "known are JSON lines of published runs, and tables that begin with params,gpus,… or suite, test, …"
    )
