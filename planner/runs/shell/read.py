"""Reading of a script: the commands that it would start, found by evaluating it without running anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.shell.expand.state import State, items_of, named_value
from megaloom.planner.runs.shell.folders import MOST_BYTES, Folders
from megaloom.planner.runs.shell.parse.source import file_source
from megaloom.planner.runs.shell.parse.text import joined, known_text, literal, shown
from megaloom.planner.runs.shell.programs import ProgramEvaluator, resolved_path
from megaloom.planner.runs.shell.sbatch import batch_variables, pbs_options, sbatch_options
from megaloom.planner.runs.words import Origin, Script, Word


def read_script(path: str | Path, environment: Mapping[str, str], positional: Sequence[str] = ()) -> Script:
    """Return the commands that a shell or Slurm script would start, and what cannot be known of them.

    `environment` holds the variables that are set when it starts, `positional` its arguments. Programs are taken to
    succeed; their output is unknown.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UserError(f"{path} has more than {MOST_BYTES:,} bytes, so it is no script")
        text = path.read_bytes().decode(errors="replace")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    return script_of_text(text, str(path), environment, positional)


def script_of_text(text: str, path: str, environment: Mapping[str, str], positional: Sequence[str] = ()) -> Script:
    """Return the commands of a script's text; its path is used in origins, and to find the files beside it."""
    repeated: list[Word] = []
    options = sbatch_options(text, path, repeated)
    given = {n: named_value(v, Origin("--env", 1)) for n, v in environment.items()}
    arguments = tuple(literal(a, Origin("--", n + 1)) for n, a in enumerate(positional))
    start = Origin(path, 1)
    working = Path.cwd()
    state = State(
        {**batch_variables(options), **given},
        arguments,
        bool(arguments),
        literal(path, start),
        path,
        literal(str(working), start),
    )
    evaluator = ProgramEvaluator(Folders(Path(path).parent, working))
    evaluator.started.append(resolved_path(path))
    try:
        flow = evaluator.parsed(file_source(text, path), state)
    except RecursionError:
        raise UserError(f"{path}: the script is nested too deeply to be evaluated") from None
    record = evaluator.record
    files = {name: content for name, written in state.files.items() if (content := known_text(written)) is not None}
    return Script(
        tuple(record.commands),
        options or pbs_options(text, path),
        tuple(record.unknown),
        tuple(record.assumed),
        files,
        tuple(repeated),
        record.left if flow == "exit" else None,
        tuple(_defined(state)),
    )


def _defined(state: State) -> Iterator[str]:
    """Yield the variables that hold at least two flags, most of them first."""
    held = {name: shown(joined(items_of(variable.value))) for name, variable in state.variables.items()}
    flags = {name: sum(word.startswith("--") for word in text.split()) for name, text in held.items()}
    yield from sorted((name for name, count in flags.items() if count > 1), key=lambda name: -flags[name])
