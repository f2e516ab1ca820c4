"""Reads the run files of `data/run_files.tsv` and compares each field with what a person read in the file.

`python -m benchmarks.run_files FOLDER` prints a table. FOLDER has the files as OWNER+NAME/PATH, at the commits that the
list names; they are other people's and not in this repository. A field is right if it is the one in `run_fields.tsv`,
which was noted by eye before the program read the file. A file that is refused counts as refused, whatever the reason.
"""

from __future__ import annotations

import csv
import shlex
import sys
from collections import Counter
from pathlib import Path

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.megatron.read import Hints
from megaloom.planner.runs.read import RunInputs, read_file
from megaloom.planner.runs.run import TrainingRun

DATA = Path(__file__).parent / "data"


def given_inputs(arguments: str) -> RunInputs:
    """Return what a user gives with a file: `--gpus 8 --vocab 32000 --env X=1 -- ARGUMENTS`."""
    words = shlex.split(arguments)
    at = words.index("--") if "--" in words else len(words)
    options, positional = words[:at], words[at + 1 :]
    pairs = list(zip(options[::2], options[1::2], strict=True))
    found = dict(pairs)
    return RunInputs(
        environment=dict(value.split("=", 1) for flag, value in pairs if flag == "--env"),
        positional=positional,
        devices=int(found["--gpus"]) if "--gpus" in found else None,
        hints=Hints(vocab=int(found["--vocab"]) if "--vocab" in found else None),
    )


def wrong_fields(run: TrainingRun, expected: str) -> list[str]:
    """Return the fields that differ from what a person read, as `name read/expected`."""
    read = {fact.name: fact.value for fact in run.stated}
    wrong = []
    for field in expected.split(";"):
        name, _, value = field.partition("=")
        got = read.get(name, "not read")
        if got != value and not (name == "recompute" and got.partition(":")[0].split(",")[0] == value):
            wrong.append(f"{name} {got}/{value}")
    return wrong


def outcome(folder: Path, row: dict[str, str]) -> tuple[str, str]:
    """Return whether a file was read right, refused or wrong, and why."""
    path = folder / row["repository"].replace("/", "+") / row["path"]
    try:
        run = read_file(str(path), given_inputs(row["arguments"]))
    except UserError as error:
        return "refused", str(error).splitlines()[0].replace(f"{path}:", "line ").replace(str(folder) + "/", "")
    if row["fields"].startswith("refused"):
        return "read", "no fields were noted"
    wrong = wrong_fields(run, row["fields"])
    return ("wrong", ", ".join(wrong)) if wrong else ("right", f"{len(row['fields'].split(';'))} fields")


def main() -> None:
    """Print the outcome of each file, and how many there are of each."""
    folder = Path(sys.argv[1])
    with (DATA / "run_fields.tsv").open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    outcomes = [outcome(folder, row) for row in rows]
    for row, (kind, why) in zip(rows, outcomes, strict=True):
        print(f"{kind:8} {row['repository']} {row['path']}\n         {why}")
    print(dict(Counter(kind for kind, _ in outcomes)))


if __name__ == "__main__":
    main()
