"""metrics.jsonl: one JSON object per event. Only rank 0 writes: losses are equal on all ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from attrs import field, fields, frozen, resolve_types

from megaloom.dsl.errors import UserError, safe_repr
from megaloom.dsl.files.json_file import parse_json

from .trackers import Log, curves

METRICS_NAME = "metrics.jsonl"


@frozen(kw_only=True)
class StepMetrics:
    """Metrics of one optimizer step. The fields are those of a "step" event in metrics.jsonl."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int  # consumed since the first step
    seconds: float
    tokens_per_second_per_device: float
    flops_per_second_per_device: float | None  # model FLOPs, as the plan counts them; None: unknown
    mfu: float | None
    peak_nbytes: int  # of the rank with the most, until now
    skipped: bool = False  # loss or gradients were not finite, so no weight has changed
    loss_scale: float | None = None  # of fp16
    terms: Mapping[str, float] = field(factory=dict)  # of the loss, if it has several, and the balancing loss
    report: Mapping[str, float] = field(factory=dict)  # of a step of the user's own


class MetricsFile:
    """Writer of metrics.jsonl: a JSON object per event, in order, no step twice. Without a path it writes no file."""

    def __init__(self, path: Path | None, *, last_step: int, trackers: Sequence[Log] = ()) -> None:
        """Open the file to append after `last_step`; lines of later steps, from an interrupted run, are dropped.

        trackers: functions that take the numbers of each event too.
        """
        self.trackers = trackers
        self.file: IO[str] | None = None
        if path:
            lines = [line for line in _complete_lines(path) if _step_of(line) <= last_step]
            unfinished = path.with_name(f"{path.name}.tmp")
            unfinished.write_text("".join(lines))
            unfinished.replace(path)
            self.file = path.open("a", buffering=1)

    def write(self, event: str, *, step: int, **values: object) -> None:
        """Append one event. A value that is NaN or infinite, which JSON does not have, is written as null."""
        if self.file:
            self.file.write(json.dumps({"event": event, "step": step, **_finite(values)}) + "\n")
        for log in self.trackers:
            log(step, curves(event, values))


def _finite(values: Mapping[str, object]) -> dict[str, object]:
    """Return the values that JSON can hold, with None for NaN and infinity."""
    return {
        name: _finite(v) if isinstance(v, Mapping) else None if isinstance(v, float) and not math.isfinite(v) else v
        for name, v in values.items()
    }


def _complete_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file, without a last one that was cut short; none if there is no file."""
    if path.exists():
        with path.open(errors="replace") as file:
            yield from (line for line in file if line.endswith("\n"))


def _step_of(line: str) -> float:
    """Return the step of a line; infinity if the line is damaged, as after a power failure."""
    try:
        return float(parse_json(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the events of a metrics file; lines that are no JSON, as after a power failure, are left out.

    Raises UserError that names a line whose values are of other types than those that we write.
    """
    events = []
    for number, line in enumerate(_complete_lines(path), 1):
        if _step_of(line) < math.inf:
            events.append(parse_json(line))
            if (wrong := _wrong_field(events[-1])) is not None:
                what = f"{path}, line {number}: {wrong} is {safe_repr(events[-1][wrong])}"
                raise UserError(f"{what}, which `train` does not write\nremove that line")
    return events


def _wrong_field(event: Mapping[str, Any]) -> str | None:
    """Return the name of a field of numbers that has something else; None if there is none.

    Only a number with a fraction may be null, which stands for NaN and infinity.
    """
    for f in (f for f in fields(resolve_types(StepMetrics)) if f.name in event):
        value, numbers = event[f.name], int | float if f.type in (int, bool) else int | float | None
        if f.name in ("terms", "report"):
            right = isinstance(value, dict) and all(isinstance(x, numbers) for x in value.values())
        else:
            right = isinstance(value, numbers)
        if not right:
            return f.name
    return None
