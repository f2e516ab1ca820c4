"""The training command of a script, and the devices that it starts on."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from types import MappingProxyType

from attrs import evolve, frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.quoting import shortened

from .run import Devices, Note
from .words import Command, Origin, Script, Word

# Flags that hardly any program but Megatron-LM has; a training command has several of them.
MARKS = frozenset(
    {
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--micro-batch-size",
        "--tensor-model-parallel-size",
        "--pipeline-model-parallel-size",
        "--seq-length",
        "--max-position-embeddings",
    }
)
# Programs that take Megatron-LM's flags and train no GPT, by a part of their path.
OTHER_PROGRAMS = {
    "bert": "a BERT",
    "t5": "an encoder-decoder",
    "ict": "a retriever",
    "retro": "a model with retrieval",
    "vision": "a vision model",
    "vlm": "a model of images and text",
    "multimodal": "a model of images and text",
    "mimo": "a model of several inputs",
    "mamba": "a model with Mamba layers",
    "hybrid": "a model with Mamba layers",
    "tasks": "a classifier, or evaluates",
    "generat": "nothing: it generates text",
    "server": "nothing: it generates text",
    "inference": "nothing: it generates text",
    "eval": "nothing: it evaluates",
    "checkpoint": "nothing: it converts checkpoints",
    "convert": "nothing: it converts checkpoints",
    "export": "nothing: it writes a model for other programs",
    "hf2mc": "nothing: it converts checkpoints",
    "hf2meg": "nothing: it converts checkpoints",
    "analyze": "nothing: it analyses data",
    "quantize": "nothing: it quantizes a model",
}
USUAL_PROGRAM = "pretrain_gpt.py"
MPI = frozenset({"mpirun", "mpiexec", "orterun"})
MPI_NAMES = {"-n": "np", "-c": "np", "-N": "npernode", "-ppn": "npernode"}
SLURM_NAMES = {"-N": "nodes", "-n": "ntasks"}
MACHINES = ("nnodes", "num_nodes", "nodes")
PER_MACHINE = ("nproc_per_node", "num_gpus", "gpus_per_node", "ntasks_per_node")
_SETTING = re.compile(r"\+{0,2}[a-z_]+(\.[a-z_]+)+=")
MOST_DIGITS = 7  # of a number of machines or processes
OF_SLURM = ("nodes", "gpus_per_node", "ntasks_per_node", "gpus", "ntasks")


@frozen
class Launch:
    """A training command: its launcher's words, the program, and the words after it."""

    before: tuple[Word, ...]
    program: Word
    words: tuple[Word, ...]
    command: Command


def training_commands(script: Script) -> Iterator[Launch]:
    """Yield the commands that start Megatron-LM, in order."""
    for command in script.commands:
        words = tuple(_split(command.words))
        for i, word in enumerate(words):
            if word.text.endswith(".py") and not word.text.startswith("-"):
                after = words[i + 1 :]
                if has_marks(after):
                    yield Launch(words[:i], word, after, command)
                    break


def check_first_words(script: Script) -> None:
    """Raise UserError for a command that begins with an option: the command before it has lost a part."""
    for command in script.commands:
        first = command.words[0] if command.words else None
        if first and (first.text.startswith("--") or _SETTING.match(first.text)):
            raise UserError(
                f"{first.origin}: a command begins with an option, at which bash fails\n"
                "the line before it may lack its backslash, or have something behind it"
            )


def lost_ending(text: str, path: str) -> Iterator[Note]:
    """Yield a note on a script whose last line is to be continued, as of one that has lost its end."""
    lines = text.rstrip().splitlines()
    if lines and lines[-1].endswith("\\"):
        what = "the last line ends with a backslash: flags may have stood on a line that is lost"
        yield Note(what, Origin(path, len(lines)))


def started_by(command: Command) -> Launch:
    """Return a command as a launch: the words before the first program or module, and those after it."""
    at = next((n for n, word in enumerate(command.words) if word.text.endswith(".py") or word.text == "-m"), 0)
    return Launch(command.words[:at], command.words[at], command.words[at + 1 :], command)


def check_program(program: Word) -> None:
    """Raise UserError for a program that takes Megatron-LM's flags and trains no GPT."""
    if other := _other(program):
        name = PurePath(program.text).name
        raise UserError(f"{program.origin}: {name} trains {other}; only training of GPT is read")


def trains_gpt(program: Word) -> bool:
    """Return whether no part of a program's path says that it does something else."""
    return not _other(program)


def _other(program: Word) -> str:
    """Return in words what a program does that trains no GPT; nothing for one that may train a GPT."""
    path = PurePath(program.text)
    words = {part for name in path.parts[-3:] for part in name.removesuffix(".py").replace("-", "_").split("_")}
    for mark, what in OTHER_PROGRAMS.items():
        if any(word == mark or (len(mark) > 4 and word.startswith(mark)) for word in words):
            return what
    return ""


def has_marks(words: Sequence[Word]) -> bool:
    """Return whether words have flags of Megatron-LM, with dashes or underscores, under any outcome of a condition."""
    return len(MARKS & {word.text.partition("=")[0].replace("_", "-") for word in _all_words(words)}) >= 2


def _all_words(words: Sequence[Word]) -> Iterator[Word]:
    """Yield words, and those that an unknown condition may add."""
    for word in words:
        yield word
        for outcome in word.either:
            yield from outcome


def _split(words: Sequence[Word]) -> Iterator[Word]:
    """Yield words; one that is a whole command, as `bash -c` takes it, as its own words."""
    for word in words:
        inner = word.text
        if " " in inner and ".py" in inner and any(mark in inner for mark in MARKS):
            try:
                inner = inner.replace("\\\n", " ")  # lines that are continued, between single quotes
                yield from (evolve(word, text=text) for text in shlex.split(inner, comments=True))
                continue
            except ValueError:
                pass
        yield word


def unread_counts(launch: Launch, sbatch: Mapping[str, Word]) -> Iterator[Note]:
    """Yield the numbers of machines and processes that are stated and not known, each with the reason."""
    options, slurm = _options(launch.before), _of_job(launch, sbatch)
    stated = [(name, options[name]) for name in (*MACHINES, *PER_MACHINE) if name in options]
    stated += [("np", one) for one in _mpi_options(launch.before).values()][:1]
    stated += [(name, slurm[name]) for name in OF_SLURM if name in slurm]
    for name, word in stated:
        if _number(word) is None:
            causes = " and ".join(f"{one.kind} {one.name}" for one in word.unknown)
            why = f"depends on {causes}" if causes else f"must be a whole number from 1, got {shortened(word.text, 20)}"
            yield Note(f"the number --{name.replace('_', '-')} {why}", word.origin)


def launched_devices(launch: Launch, sbatch: Mapping[str, Word]) -> Devices | None:
    """Return the devices that a launcher and the batch system state; None if they do not, or not as whole numbers."""
    options, slurm = _options(launch.before), _of_job(launch, sbatch)
    if (world := launch.command.environment.get("WORLD_SIZE")) and (count := _number(world)):
        return Devices(count, None, world.origin)
    if mpi := _mpi_options(launch.before):
        total, each = _first(mpi, ("np",)), _first(mpi, ("npernode",))
        if total:
            return Devices(total[0], each[0] if each else None, total[1])
        options = {}  # of which -n and -N are MPI's
    each = _first(options, PER_MACHINE) or _first(slurm, ("gpus_per_node", "ntasks_per_node"))
    machines = _first(options, MACHINES) or _first(slurm, ("nodes",))
    if machines is None and ({*MACHINES} & options.keys() or "nodes" in slurm):
        return None
    if {*PER_MACHINE} & options.keys() and _first(options, PER_MACHINE) is None:
        return None
    if each is None:
        total = _first(slurm, ("gpus", "ntasks"))
        return Devices(total[0], None, total[1]) if total else None
    started_by_torchrun = any(PurePath(word.text).name in ("torchrun", "deepspeed") for word in launch.before)
    if machines is None and not (started_by_torchrun or _first(options, PER_MACHINE)):
        return None
    return Devices((machines[0] if machines else 1) * each[0], each[0], (machines or each)[1])


def _of_job(launch: Launch, sbatch: Mapping[str, Word]) -> dict[str, Word]:
    """Return what a batch system is asked for: by the lines of the file, or in the job that a script submits."""
    if sbatch:
        return {name.replace("-", "_"): word for name, word in sbatch.items()}
    variables = {
        "SLURM_NNODES": "nodes",
        "SLURM_GPUS_ON_NODE": "gpus_per_node",
        "SLURM_NTASKS_PER_NODE": "ntasks_per_node",
    }
    environment = launch.command.environment
    return {name: environment[variable] for variable, name in variables.items() if variable in environment}


def _mpi_options(words: Sequence[Word]) -> dict[str, Word]:
    """Return how many processes mpirun starts, in all and on a machine; nothing where torchrun starts them."""
    names = [PurePath(word.text).name for word in words]
    at = next((position for position, name in enumerate(names) if name in MPI), None)
    if at is None or {"torchrun", "torch.distributed.run", "torch.distributed.launch", "deepspeed"} & {*names}:
        return {}
    options = _options(words[at:], MPI_NAMES)
    return {name: options[name] for name in ("np", "npernode") if name in options}


def _options(words: Sequence[Word], short: Mapping[str, str] = MappingProxyType(SLURM_NAMES)) -> dict[str, Word]:
    """Return the options of a launcher by name, with underscores. short: names of those with one dash."""
    found: dict[str, Word] = {}
    for i, word in enumerate(words):
        name, equals, attached = word.text.partition("=")
        if name.startswith("-"):
            key = short.get(name, name.lstrip("-").replace("-", "_"))
            if equals:
                found[key] = evolve(word, text=attached)
            elif i + 1 < len(words):
                found[key] = words[i + 1]
    return found


def _first(options: Mapping[str, Word], names: Sequence[str]) -> tuple[int, Origin] | None:
    for name in names:
        if name in options and (number := _number(options[name])):
            return number, options[name].origin
    return None


def _number(word: Word) -> int | None:
    """Return the number at the end of a word: of 8, h100:8, or 1:4 (torchrun's range); None if it has none."""
    digits = word.text.rpartition(":")[2].partition("(")[0].strip()
    number = int(digits) if digits.isdecimal() and len(digits) <= MOST_DIGITS and not word.unknown else 0
    return number or None
