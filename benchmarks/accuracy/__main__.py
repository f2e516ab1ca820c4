"""The cost model and published training runs: `python -m benchmarks.accuracy --help` lists the commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter

from megaloom.dsl.errors import UserError, full_message
from megaloom.dsl.quoting import shown_message
from megaloom.dsl.show.printing import show
from megaloom.planner.cli.arguments import unwrap_help, usage_error
from megaloom.planner.cli.process import run_and_flush

from . import scoreboard
from .pages import update_pages
from .run_files import fitted_files
from .scoring import validate_files

PROGRAM = "python -m benchmarks.accuracy"
app = App(name=PROGRAM, help_format="plaintext", version_flags=[])


@app.default
@unwrap_help
def pages(*names: str, check: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Write the tables of docs/accuracy.

    Parameters
    ----------
    names
        Pages, such as constants; without one, all pages.
    check
        Write nothing. List pages that are out of date; the exit status is 1 if there are any.
    """
    return update_pages(names, check=check)


@app.command
@unwrap_help
def validate(
    *files: Path,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    markdown: Annotated[bool, Parameter(negative="")] = False,
    by: Literal["group", "source", "kind"] = "group",
) -> None:
    """Predict published training runs from model, hardware and layout alone, and print the errors.

    Parameters
    ----------
    files
        Files of published runs, one JSON object a line; without one, the published runs in benchmarks/accuracy/data
        to which constants were fitted.
    as_json
        Print all scores and predictions as JSON.
    markdown
        Print the scores as a Markdown table.
    by
        Rows of that table: groups (source, GPU, precision and kind of model), sources, or kinds of runs, each of which
        has its own 90 % interval. Rows of kinds also have the scores of the models that no constant was fitted to.
    """
    found = validate_files(*(files or fitted_files()))
    if as_json:
        json.dump(scoreboard.validation_json(found), sys.stdout, indent=1)
        print()
    elif markdown:
        print(scoreboard.markdown(found, scoreboard.TableBy(by)))
    else:
        show(scoreboard.board(found), sys.stdout)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. Print errors that the user can correct."""
    try:
        return run_and_flush(lambda: app(argv, exit_on_error=False, print_error=False, result_action="return_value"))
    except CycloptsError as error:
        message = f"{usage_error(error)}\n`{PROGRAM} --help` lists the commands and options"
    except UserError as error:
        message = full_message(error)
    print(f"{PROGRAM}: {shown_message(message)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
