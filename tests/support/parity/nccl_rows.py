"""Results of `nccl_table`: one JSON object a line, of which the last of a case counts, and their tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, field, frozen


@frozen
class Key:
    """A case: a family under a layout in a precision."""

    family: str
    layout: str
    precision: str

    def __str__(self) -> str:
        return f"{self.family}, {self.layout}, {self.precision}"


@frozen(kw_only=True)
class Row:
    """The result of a case: differences from one process, the error that ended it, or the rule that refuses it."""

    family: str
    layout: str
    precision: str
    gpus: str = ""
    loss_error: float = 0.0
    norm_error: float = 0.0
    gradient_error: float = 0.0
    weight: str = ""  # whose gradient differs most
    losses: tuple[float, ...] = field(default=(), converter=tuple)
    tolerance: float = 0.0
    agrees: bool = False
    seconds: float = 0.0
    refused: str = ""
    error: str = ""
    traceback: str = ""

    @classmethod
    def of(cls, key: Key, **found: Any) -> Row:
        """Return the row of a case."""
        return cls(family=key.family, layout=key.layout, precision=key.precision, **found)

    @property
    def key(self) -> Key:
        """Return the case."""
        return Key(self.family, self.layout, self.precision)

    @property
    def largest(self) -> float:
        """Return the largest difference, of a gradient or of a loss."""
        return max(self.gradient_error, self.loss_error)

    @property
    def cell(self) -> str:
        """Return the cell of the table: the largest difference, with an exclamation mark beyond the tolerance."""
        if self.refused:
            return "refused"
        return "error" if self.error else f"{self.largest:.0e}" + ("" if self.agrees else "!")

    @property
    def line(self) -> str:
        """Return the result in one line."""
        if self.refused or self.error:
            return f"{self.key}: {'refused' if self.refused else 'error'}: {self.refused or self.error}"
        status = "ok" if self.agrees else "DIFFERS"
        errors = f"gradients {self.gradient_error:.1e} ({self.weight}), losses {self.loss_error:.1e}"
        return f"{self.key}: {status}: {errors}, norms {self.norm_error:.1e}"


def append(output: Path, row: Row) -> None:
    """Append a row in one write, so that several processes may share the file."""
    with output.open("a") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def read(output: Path) -> dict[Key, Row]:
    """Return the last row of each case."""
    lines = output.read_text().splitlines() if output.exists() else ()
    return {row.key: row for row in (Row(**json.loads(line)) for line in lines)}


def failed(key: Key, text: str) -> Row:
    """Return the row of a case that has ended in an error. The first line of the text is its sentence."""
    return Row.of(key, error=text.strip().splitlines()[0], traceback=text)


def report(rows: Mapping[Key, Row], layouts: Sequence[str]) -> str:
    """Return a table of families x layouts for each precision, then a line for each case that is not in order."""
    return "\n".join(_report(rows, layouts))


def _report(rows: Mapping[Key, Row], layouts: Sequence[str]) -> Iterator[str]:
    for precision in dict.fromkeys(key.precision for key in rows):
        own = {key: row for key, row in rows.items() if key.precision == precision}
        ended = [row for row in own.values() if not row.error and not row.refused]
        yield f"\n{precision}, {', '.join(sorted({row.gpus for row in ended}))}\n"
        yield f"| family | {' | '.join(layouts)} |\n|---|{'---|' * len(layouts)}"
        for family in dict.fromkeys(key.family for key in own):
            found = [own.get(Key(family, layout, precision)) for layout in layouts]
            yield f"| {family} | {' | '.join('–' if row is None else row.cell for row in found)} |"
        if ended:
            most, agree = max(ended, key=lambda row: row.largest), sum(row.agrees for row in ended)
            yield f"\n{agree} of {len(ended)} agree; largest difference {most.largest:.1e}: {most.key}, {most.weight}"
    yield ""
    yield from (row.line for row in rows.values() if not row.agrees)
