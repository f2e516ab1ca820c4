"""A run of Megatron-LM from its log: all arguments, then time and memory of its iterations.

Lines that are not understood are left out, and are never shown: they may hold a secret.
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from attrs import evolve, frozen

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.run import Devices, Measured, TrainingRun
from megaloom.planner.runs.words import Origin, Word

from .flag import Effect, Flag
from .parser import Arguments, GivenArgument, by_dest
from .read import ArgumentSource, Hints, read_run
from .versions import RENAMED

LISTING_BEGIN = re.compile(r"-{10,} arguments -{10,}")
LISTING_END = re.compile(r"-{10,} end of arguments -{10,}")
ARGUMENT = re.compile(r"(?:^|\s)([A-Za-z_]\w*) \.{2,} (.*?)\s*$")  # launchers may write a prefix before it
VOCABULARY = re.compile(r"padded vocab \(size: (\d+)\)")
ITERATION = re.compile(r"iteration\s+(\d+)\s*/\s*\d+.*elapsed time per iteration \(ms\):\s*([\d.]+)")
MEMORY_REPORT = re.compile(r"memory \(MB\).*?max allocated:\s*([\d.]+)")
WARM_UP = 3  # printed intervals at the beginning that are left out, if more remain than these
OUTLIER = 1.5  # times the median beyond which an interval is left out: a checkpoint, an evaluation, a restart


@frozen
class Iteration:
    """One printed interval of a log: the iteration at its end, and seconds per iteration."""

    number: int
    seconds: float
    line_number: int


def is_log(text: str) -> bool:
    """Return whether a text is a log of Megatron-LM: it has the list of all arguments."""
    return LISTING_BEGIN.search(text) is not None


def read_log(text: str, path: str, devices: int | None, hints: Hints) -> TrainingRun:
    """Return the run of a log. devices: how many there are, if the user says so."""
    lines = text.splitlines()
    stated = dict(_arguments(lines, path))
    if "num_layers" not in stated and "encoder_num_layers" not in stated:
        raise UserError(f"{path} lists no argument that says how many layers the model has")
    world = stated.get("world_size")
    count = devices or (int(world.text) if world and world.text.isdigit() else None)
    if count is None:
        raise UserError(f"{path} does not list world_size\ngive the number of GPUs: --gpus 64xH100")
    measured = _measured(list(_iterations(lines)), _memory(lines), path)
    source = ArgumentSource(path, Devices(count, None, world.origin if world else None), (), measured, None, hints)
    return read_run(_as_arguments(stated), _with_vocabulary(source, lines))


def _with_vocabulary(source: ArgumentSource, lines: Sequence[str]) -> ArgumentSource:
    """Return the source with the vocabulary that the log reports, unless the user states another."""
    found = next((match for line in lines if (match := VOCABULARY.search(line))), None)
    if found is None or source.hints.vocab is not None:
        return source
    return evolve(source, hints=evolve(source.hints, vocab=int(found[1])))


def _arguments(lines: Sequence[str], path: str) -> Iterator[tuple[str, Word]]:
    """Yield the listed arguments by destination."""
    inside = False
    for number, line in enumerate(lines, 1):
        if LISTING_BEGIN.search(line):
            inside = True
        elif LISTING_END.search(line):
            return
        elif inside and (found := ARGUMENT.search(line)):
            yield found[1], Word(found[2], Origin(path, number))


def _as_arguments(stated: Mapping[str, Word]) -> Arguments:
    """Return the listed values as arguments: those of known destinations, with what Megatron-LM derived undone."""
    known, given = by_dest(), dict[str, GivenArgument]()
    for dest, word in stated.items():
        dest = RENAMED.get(dest, dest)
        flag = known.get(dest)
        if flag is None or word.text == "None" or flag.effect is Effect.NOTHING:
            continue
        value = _value(flag, word.text)
        if value is not None:
            given[dest] = GivenArgument(flag, value, evolve(word, text=flag.name), () if flag.nargs == "0" else (word,))
    if chunks := stated.get("virtual_pipeline_model_parallel_size"):
        given |= _chunks(chunks, given)
    return Arguments(given=given, complete=True)


def _chunks(word: Word, given: Mapping[str, GivenArgument]) -> dict[str, GivenArgument]:
    """Return the number of chunks as the flag that states it, unless a layout or a number of layers does."""
    others = ("pipeline_model_parallel_layout", "num_layers_per_virtual_pipeline_stage")
    dest = "num_virtual_stages_per_pipeline_rank"
    if not word.text.isdigit() or dest in given or any(other in given for other in others):
        return {}
    flag = by_dest()[dest]
    return {dest: GivenArgument(flag, int(word.text), evolve(word, text=flag.name), (word,))}


def _value(flag: Flag, text: str) -> Any:
    """Return a printed value as the flag's type; None for one that is not of it."""
    if flag.effect is not Effect.READ and flag.nargs != "0":
        return text
    try:
        if flag.nargs == "0":
            return {"True": True, "False": False}[text]
        if text.startswith("[") and flag.nargs == "1":
            return text.replace(" ", "")
        if text.startswith("["):
            return tuple(flag.kind(one) for one in literal_eval(text))  # type: ignore[call-arg]
        if flag.kind is str:
            plain = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}.get(text, text)
            return plain if flag.nargs == "1" else (plain,)
        number = flag.kind(text)  # type: ignore[call-arg]
    except (KeyError, ValueError, SyntaxError):
        return None
    return number if flag.nargs == "1" else (number,)


def _iterations(lines: Sequence[str]) -> Iterator[Iteration]:
    for number, line in enumerate(lines, 1):
        if found := ITERATION.search(line):
            yield Iteration(int(found[1]), float(found[2]) / 1e3, number)


def _memory(lines: Sequence[str]) -> int | None:
    """Return the most bytes that tensors took on a rank, as the log reports them."""
    most = [float(found[1]) for line in lines if (found := MEMORY_REPORT.search(line))]
    return int(max(most) * 2**20) if most else None


def _measured(printed: Sequence[Iteration], nbytes: int | None, path: str) -> Measured | None:
    """Return the median of the printed intervals without warm-up and outliers; None if nothing was printed."""
    if not printed:
        return None
    warm = WARM_UP if len(printed) > 2 * WARM_UP else min(1, len(printed) - 1)
    rest, left_out = printed[warm:], []
    if warm:
        left_out.append(f"iterations up to {printed[warm - 1].number} as warm-up")
    usual = median(one.seconds for one in rest)
    counted = [one for one in rest if one.seconds <= OUTLIER * usual]
    if slow := [one for one in rest if one.seconds > OUTLIER * usual]:
        named = ", ".join(str(one.number) for one in slow[:5]) + (", …" if len(slow) > 5 else "")
        lost = sum(one.seconds - usual for one in slow)
        left_out.append(f"{len(slow)} slow intervals (iteration {named}), {lost:.1f} s above the median in all")
    seconds = median(one.seconds for one in counted)
    return Measured(seconds, len(counted), tuple(left_out), nbytes, Origin(path, counted[0].line_number))
