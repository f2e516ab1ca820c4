"""Iterations that a log prints, and the measured step that they give: without warm-up and outliers.

Megatron-LM and Megatron-Bridge print seconds per iteration, NeMo too under another name, torchtitan tokens per second
of a device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from statistics import median

from attrs import evolve, frozen

from megaloom.planner.contract.layout import Layout
from megaloom.planner.cost.measured_memory import held_bytes

from .run import Measured
from .words import Origin

WARM_UP = 3  # printed intervals at the beginning that are left out, if more remain than these
OUTLIER = 1.5  # times the median beyond which an interval is left out: a checkpoint, an evaluation, a restart
SLOW_NAMED = 5  # slow intervals that are named
TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*m")
MEGATRON_LINE = re.compile(r"iteration\s+(\d+)\s*/\s*\d+.*elapsed time per iteration \(ms\):\s*([\d.]+)")
NEMO_LINE = re.compile(r"global_step[=:]\s*(\d+)(?:\.\d+)?\b.*train_step_timing in s[=:]\s*([\d.]+)")
TITAN_LINE = re.compile(r"step:\s*(\d+)\s+loss:.*\b(?:tps|wps):\s*([\d,]+)")
BATCH = re.compile(r"global[_ ]batch[_ ]size:\s*(\d+)")
MEMORY_REPORT = re.compile(
    r"(?:\[Rank (\d+)\].*)?memory \(MB\).*?max allocated:\s*([\d.]+)(?:.*?max reserved:\s*([\d.]+))?"
)


class LogProgram(StrEnum):
    """Program that wrote a log, by the form of its iterations."""

    MEGATRON = "Megatron-LM or Megatron-Bridge"
    NEMO = "NeMo"
    TITAN = "torchtitan"


PATTERNS = {LogProgram.MEGATRON: MEGATRON_LINE, LogProgram.NEMO: NEMO_LINE, LogProgram.TITAN: TITAN_LINE}


@frozen
class Iteration:
    """One printed interval of a log: the iteration at its end, seconds per iteration, and the batch if it is printed.

    torchtitan prints no seconds. They are those in which a device takes one token.
    """

    number: int
    seconds: float
    line_number: int
    batch: int | None = None


def iterations_of(lines: Sequence[str]) -> tuple[LogProgram | None, list[Iteration]]:
    """Return the program that wrote a log, and its iterations; None and none for a text that has none."""
    for program, pattern in PATTERNS.items():
        if found := list(_matching(lines, program, pattern)):
            return program, found
    return None, []


def _matching(lines: Sequence[str], program: LogProgram, pattern: re.Pattern[str]) -> Iterator[Iteration]:
    for number, line in enumerate(lines, 1):
        if found := pattern.search(TERMINAL_CODES.sub("", line) if "\x1b" in line else line):
            batch = BATCH.search(line)
            if seconds := _seconds(program, float(found[2].replace(",", ""))):
                yield Iteration(int(found[1]), seconds, number, int(batch[1]) if batch else None)


def _seconds(program: LogProgram, value: float) -> float:
    """Return seconds from a printed value; 0 for a value that is none."""
    if program is LogProgram.TITAN:
        return 1 / value if value else 0.0
    return value / 1e3 if program is LogProgram.MEGATRON else value


@frozen
class MaxAllocated:
    """The most bytes that tensors took on a device, its rank, if that is printed, and what the allocator held there.

    by_rank: each rank that is reported, and the most bytes of its tensors.
    """

    nbytes: int
    rank: int | None = None
    reserved: int | None = None
    by_rank: tuple[tuple[int, int], ...] = ()


def max_allocated(lines: Sequence[str]) -> MaxAllocated | None:
    """Return the most memory of those that Megatron-LM's reports have: often they are of a few ranks only."""
    reports = [_report(found) for line in lines if (found := MEMORY_REPORT.search(line))]
    most = max(reports, key=lambda report: report.nbytes, default=None)
    ranks: dict[int, int] = {}
    for one in reports:
        if one.rank is not None:
            ranks[one.rank] = max(one.nbytes, ranks.get(one.rank, 0))
    return most and evolve(most, by_rank=tuple(sorted(ranks.items())))


def _report(found: re.Match[str]) -> MaxAllocated:
    rank, reserved = (int(found[1]) if found[1] else None), (int(float(found[3]) * 2**20) if found[3] else None)
    return MaxAllocated(int(float(found[2]) * 2**20), rank, reserved)


def allocated_ratio(measured: Measured, layout: Layout, ranks: Sequence[Mapping[str, int]]) -> float | None:
    """Return measured over predicted bytes of tensors, on the pipeline rank that was measured; else on the fullest.

    ranks: predicted memory of each pipeline rank. Ranks of one pipeline rank have consecutive numbers (megatron-core
    0.16.1, parallel_state.py: initialize_model_parallel, order "tp-cp-ep-dp-pp"). None if memory was not measured.
    """
    if measured.nbytes is None:
        return None
    if measured.rank is not None and measured.rank < layout.world:
        ranks = [ranks[measured.rank * layout.pp // layout.world]]
    return measured.nbytes / max(held_bytes(held, "allocated") for held in ranks)


def measured_step(
    printed: Sequence[Iteration], most: MaxAllocated | None, path: str, batch: int | None = None
) -> Measured | None:
    """Return the median of the printed intervals without warm-up and outliers; None if nothing was printed.

    most: the memory that the log reports. batch: the batch of the run. Intervals that print another one, as while the
    batch grows, are left out.
    """
    same = [one for one in printed if batch is None or one.batch in (None, batch)]
    if not same:
        return None
    left_out = [f"{len(printed) - len(same)} intervals with another batch than {batch}"] if same != printed else []
    warm = WARM_UP if len(same) > 2 * WARM_UP else min(1, len(same) - 1)
    rest = same[warm:]
    if warm:
        left_out.append(f"iterations up to {same[warm - 1].number} as warm-up")
    usual = median(one.seconds for one in rest)
    counted = [one for one in rest if one.seconds <= OUTLIER * usual]
    if slow := [one for one in rest if one.seconds > OUTLIER * usual]:
        named = ", ".join(str(one.number) for one in slow[:SLOW_NAMED]) + (", …" if len(slow) > SLOW_NAMED else "")
        lost = sum(one.seconds - usual for one in slow)
        left_out.append(f"{len(slow)} slow intervals (iteration {named}), {lost:.1f} s above the median in all")
    seconds = median(one.seconds for one in counted)
    origin = Origin(path, counted[0].line_number)
    measured = Measured(seconds, len(counted), tuple(left_out), origin=origin)
    if most is None:
        return measured
    return evolve(measured, nbytes=most.nbytes, rank=most.rank, reserved=most.reserved, by_rank=most.by_rank)
