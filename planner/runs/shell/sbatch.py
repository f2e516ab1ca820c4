"""Options of `#SBATCH` lines, and the variables that Slurm sets from them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.shell.expand.state import Variable
from megaloom.planner.runs.shell.parse.text import literal, missing
from megaloom.planner.runs.words import Origin, Unknown, Word

SHORT = {
    "N": "nodes",
    "n": "ntasks",
    "c": "cpus-per-task",
    "G": "gpus",
    "J": "job-name",
    "p": "partition",
    "t": "time",
    "A": "account",
    "w": "nodelist",
    "o": "output",
    "e": "error",
    "a": "array",
    "q": "qos",
    "C": "constraint",
    "x": "exclude",
}
OF_THE_JOB = tuple(
    f"SLURM_{name}"
    for name in (
        [
            "JOB_ID",
            "JOBID",
            "JOB_NODELIST",
            "NODELIST",
            "NODEID",
            "PROCID",
            "LOCALID",
            "SUBMIT_DIR",
            "ARRAY_TASK_ID",
            "TASKS_PER_NODE",
        ]
    )
)
_LINE = re.compile(r"#SBATCH\s+(.*)")
_PBS_SELECT = re.compile(r"#PBS\s+-l\s+(?:\S*,)?select=(\d+):(\S+)")


def sbatch_options(text: str, path: str, repeated: list[Word] | None = None) -> dict[str, Word]:
    """Return the options of the `#SBATCH` lines before the first command, by their long names; the last one counts.

    repeated: gathers the options that stand again with another value.
    """
    options: dict[str, Word] = {}
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            break
        if match := _LINE.match(line.rstrip("\r")):
            try:
                words = shlex.split(match[1], comments=True)
            except ValueError:
                raise UserError(f"{path}:{number}: a quote has no end on this line") from None
            for name, word in _options(words, Origin(path, number)).items():
                if repeated is not None and name in options and options[name].text != word.text:
                    repeated.append(Word(f"#SBATCH --{name}", word.origin))
                options[name] = word
    return options


def pbs_options(text: str, path: str) -> dict[str, Word]:
    """Return the machines and their GPUs that a line `#PBS -l select=4:ngpus=8` asks for, by Slurm's names."""
    for number, line in enumerate(text.split("\n"), 1):
        found = _PBS_SELECT.match(line)
        gpus = re.search(r"(?:^|:)ngpus=(\d+)(?=:|,|$)", found[2]) if found else None
        if found and gpus and "+" not in found[2]:
            origin = Origin(path, number)
            return {"nodes": Word(found[1], origin), "gpus-per-node": Word(gpus[1], origin)}
    return {}


def _options(words: list[str], origin: Origin) -> dict[str, Word]:
    found: dict[str, Word] = {}
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
        elif word.startswith("-") and len(word) > 1:
            name, value = SHORT.get(word[1], word[1]), word[2:].removeprefix("=")
            equals = value
        else:
            continue
        following = words[position] if position < len(words) else ""
        if not equals and following and not following.startswith("-"):
            value = following
            position += 1
        found[name] = Word(value, origin)
    return found


def gpus_per_node(options: Mapping[str, Word]) -> Word | None:
    """Return the number of GPUs of a node that the options ask for: `--gpus-per-node=h100:8`, `--gres=gpu:8`."""
    for name in ("gpus-per-node", "gres"):
        if name in options:
            text = options[name].text
            items = [i for i in text.split(",") if name == "gpus-per-node" or re.match(r"gpu(:|$)", i)]
            if items:
                count = re.search(r"(?:^|[:=])(\d+)(?:\(|$)", items[0])
                if count is None and items[0].rpartition(":")[2][:1].isdecimal():
                    return None  # a number with more behind it
                return Word(count[1] if count else "1", options[name].origin)
    return None


def batch_variables(options: Mapping[str, Word]) -> dict[str, Variable]:
    """Return the variables that Slurm sets in a job with these options; those of the running job are unknown."""
    if not options:
        return {}
    origin = next(iter(options.values())).origin
    values: dict[str, Word] = {}
    nodes = options.get("nodes")
    nodes = nodes if nodes and nodes.text.isdecimal() else None
    gpus, tasks = gpus_per_node(options), options.get("ntasks-per-node")
    for names, word in (
        ("SLURM_NNODES SLURM_JOB_NUM_NODES", nodes),
        ("SLURM_GPUS_ON_NODE", gpus),
        ("SLURM_GPUS_PER_NODE", gpus if gpus and "gpus-per-node" in options else None),
        ("SLURM_NTASKS_PER_NODE", tasks),
        ("SLURM_CPUS_PER_TASK", options.get("cpus-per-task")),
        ("SLURM_JOB_NAME", options.get("job-name")),
        ("SLURM_NTASKS SLURM_NPROCS", _all_tasks(options, nodes, tasks)),
    ):
        if word:
            values |= dict.fromkeys(names.split(), word)
    result = {n: Variable(missing(Unknown(n, "variable", origin)), exported=True) for n in OF_THE_JOB}
    return result | {n: Variable(literal(w.text, w.origin), exported=True) for n, w in values.items()}


def _all_tasks(options: Mapping[str, Word], nodes: Word | None, tasks: Word | None) -> Word | None:
    if "ntasks" in options:
        return options["ntasks"]
    if nodes and tasks and tasks.text.isdecimal():
        return Word(str(int(nodes.text) * int(tasks.text)), tasks.origin)
    return None
