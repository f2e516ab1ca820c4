"""A run of Megatron-LM from its log: all arguments, then time and memory of its iterations.

Lines that are not understood are left out, and are never shown: they may hold a secret.
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.dsl.quoting import shortened
from megaloom.planner.runs.iterations import MEGATRON_LINE, iterations_of, max_allocated, measured_step
from megaloom.planner.runs.run import Devices, Note, TrainingRun
from megaloom.planner.runs.words import Origin, Word

from .flag import Effect, Flag
from .parser import Arguments, GivenArgument, by_dest
from .read import ArgumentSource, Hints, read_run
from .versions import RENAMED

LISTING_BEGIN = re.compile(r"-{10,} arguments -{10,}")
LISTING_END = re.compile(r"-{10,} end of arguments -{10,}")
ARGUMENT = re.compile(r"(?:^|\s)([A-Za-z_]\w*) \.{2,} (.*?)\s*$")  # launchers may write a prefix before it
VOCABULARY = re.compile(r"padded vocab \(size: (\d+)\)")


def check_beginning(text: str, path: str) -> None:
    """Raise UserError for a part of a log: its first line is an iteration, and the list of arguments is missing."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    if MEGATRON_LINE.search(first) and not first.lstrip().startswith("#"):
        raise UserError(
            f"{path} begins with iterations: the list of arguments, which a log has before them, is missing\n"
            "give the log from its beginning, or the script that starts it with --measured SECONDS"
        )


def is_log(text: str) -> bool:
    """Return whether a text is a log of Megatron-LM: it has the list of all arguments."""
    return LISTING_BEGIN.search(text) is not None


_DERIVED = """
consumed_train_samples consumed_valid_samples data_parallel_size enable_gpt_oss finetune_data_split finetune_hf_dataset
iteration local_rank modelopt_enabled params_dtype rank skipped_train_samples transformer_pipeline_model_parallel_size
use_dist_ckpt variable_seq_lengths virtual_pipeline_model_parallel_size world_size
"""
DERIVED = frozenset(_DERIVED.split())
"""Arguments that Megatron-LM derives from others, or that change no step of training, and that no flag states."""
OF_OTHER_PROGRAMS = "export_"  # how the names of arguments of NVIDIA's Model Optimizer begin
ALWAYS_LISTED = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "global_batch_size", "bf16")
SHOWN_ARGUMENTS = 8
WORLD_DIGITS = 7  # of a number of GPUs


def read_log(text: str, path: str, devices: int | None, hints: Hints) -> TrainingRun:
    """Return the run of a log. devices: how many there are, if the user says so."""
    lines = text.splitlines()
    stated = _listed(lines, path)
    if "num_layers" not in stated and "encoder_num_layers" not in stated:
        raise UserError(f"{path} lists no argument that says how many layers the model has")
    world = stated.get("world_size")
    listed = int(world.text) if world and world.text.isdecimal() and len(world.text) <= WORLD_DIGITS else 0
    count = devices or listed
    if not count:
        raise UserError(f"{path} does not list world_size\ngive the number of GPUs: --gpus 64xH100")
    assumed = list(_notes(stated, lines, path))
    if world and listed != count:
        assumed.append(Note(f"{count} GPUs (`--gpus`), though the log lists {shortened(world.text, 20)}", world.origin))
    source = ArgumentSource(path, Devices(count, None, world.origin if world else None), tuple(assumed), hints=hints)
    run = read_run(_as_arguments(stated), _with_vocabulary(source, lines))
    _, printed = iterations_of(lines)
    return evolve(run, measured=measured_step(printed, max_allocated(lines), path, run.workload.batch))


def _with_vocabulary(source: ArgumentSource, lines: Sequence[str]) -> ArgumentSource:
    """Return the source with the vocabulary that the log reports, unless the user states another."""
    found = next((match for line in lines if (match := VOCABULARY.search(line))), None)
    if found is None or source.hints.vocab is not None:
        return source
    return evolve(source, hints=evolve(source.hints, vocab=int(found[1])))


def _listed(lines: Sequence[str], path: str) -> dict[str, Word]:
    """Return the first list of arguments, by destination.

    Raise UserError for a list that has no end, and for an argument that it has twice with different values.
    """
    stated: dict[str, Word] = {}
    for dest, word in _arguments(lines, path):
        if dest in stated and stated[dest].text != word.text:
            raise UserError(f"{word.origin}: the argument {dest} is listed here again with another value")
        stated.setdefault(dest, word)
    if not any(map(LISTING_END.search, lines)):
        raise UserError(f"{path} ends within its list of arguments, so it does not have all of them")
    return stated


def _notes(stated: Mapping[str, Word], lines: Sequence[str], path: str) -> Iterator[Note]:
    """Yield what is not known of the listed arguments: names, values that are not listed, lists that come later."""
    known = by_dest()
    others = [
        dest
        for dest, word in stated.items()
        if RENAMED.get(dest, dest) not in known
        and dest not in DERIVED
        and not dest.startswith(OF_OTHER_PROGRAMS)
        and word.text not in ("None", "False")
    ]
    if others:
        more = ", …" if len(others) > SHOWN_ARGUMENTS else ""
        names = ", ".join(shortened(name, 40) for name in others[:SHOWN_ARGUMENTS]) + more
        yield Note(f"{len(others)} listed arguments are not known, and left out: {names}", stated[others[0]].origin)
    end = next(number for number, line in enumerate(lines) if LISTING_END.search(line))
    start = next(number for number, line in enumerate(lines) if LISTING_BEGIN.search(line))
    strange = [line for line in lines[start + 1 : end] if " ...." in line and not ARGUMENT.search(line)]
    if strange:
        yield Note(f"{len(strange)} lines of the list of arguments are not understood, and left out")
    if lacking := [dest for dest in ALWAYS_LISTED if dest not in stated]:
        yield Note(f"the log does not list {', '.join(lacking)}: the default of Megatron-LM is taken")
    changed = [
        dest
        for dest, word in _arguments(lines[end + 1 :], path)
        if dest in stated and word.text != stated[dest].text and dest in known and known[dest].effect is Effect.READ
    ]
    if changed:
        names = ", ".join(changed[:SHOWN_ARGUMENTS])
        yield Note(f"a later list of arguments has other values of {names}: the first list is read")


def _arguments(lines: Sequence[str], path: str) -> Iterator[tuple[str, Word]]:
    """Yield the arguments of the first list by destination."""
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
        due = "True or False" if flag.nargs == "0" else flag.due
        if value is None and due and flag.effect is Effect.READ:
            raise UserError(f"{word.origin}: {dest} must be {due}")
        if value is not None:
            given[dest] = GivenArgument(flag, value, evolve(word, text=flag.name), () if flag.nargs == "0" else (word,))
    if chunks := stated.get("virtual_pipeline_model_parallel_size"):
        given |= _chunks(chunks, given)
    return Arguments(given=given, complete=True)


def _chunks(word: Word, given: Mapping[str, GivenArgument]) -> dict[str, GivenArgument]:
    """Return the number of chunks as the flag that states it, unless a layout or a number of layers does."""
    others = ("pipeline_model_parallel_layout", "num_layers_per_virtual_pipeline_stage")
    dest = "num_virtual_stages_per_pipeline_rank"
    if not word.text.isdecimal() or dest in given or any(other in given for other in others):
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
        if text.startswith("[") and flag.nargs == "1" and not flag.due:
            return text.replace(" ", "")
        if text.startswith(("[", "(")) and flag.nargs != "1":
            return tuple(flag.kind(one) for one in literal_eval(text))  # type: ignore[call-arg]
        if flag.kind is str:
            plain = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}.get(text, text)
            return plain if flag.nargs == "1" else (plain,)
    except (KeyError, TypeError, ValueError, SyntaxError):
        return None
    number = flag.typed(text)
    return number if number is None or flag.nargs == "1" else (number,)
