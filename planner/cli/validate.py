"""`megaloom validate`: compare the cost model with published training runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter


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
        Files of published runs, one JSON object a line; without one, the published runs that ship with megaloom.
    as_json
        Print all scores and predictions as JSON.
    markdown
        Print the scores as a Markdown table.
    by
        Rows of that table: groups (source, GPU, precision and kind of model), sources, or kinds of runs, each of which
        has its own 90 % interval. Rows of kinds also have the scores of the models that no constant was fitted to.
    """
    from megaloom.dsl.show.printing import show
    from megaloom.planner.validate import scoreboard
    from megaloom.planner.validate.run_files import fitted_files
    from megaloom.planner.validate.scoring import validate_files

    found = validate_files(*(files or fitted_files()))
    if as_json:
        json.dump(scoreboard.validation_json(found), sys.stdout, indent=1)
        print()
    elif markdown:
        print(scoreboard.markdown(found, scoreboard.TableBy(by)))
    else:
        show(scoreboard.board(found), sys.stdout)
