"""`megaloom validate`: the cost model against runs that others published."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter


def validate(
    file: Path,
    /,
    *files: Path,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    markdown: Annotated[bool, Parameter(negative="")] = False,
    by: Literal["group", "source", "kind"] = "group",
) -> None:
    """Predict published training runs from model, hardware and layout alone, and print how far off that is.

    Parameters
    ----------
    file
        JSON lines of runs, vTrain's table of sweeps, or the table of Megatron-LM's functional tests.
    files
        More of them.
    as_json
        Print every score and every prediction as JSON and nothing else.
    markdown
        Print the scores as the table of a README.
    by
        What has a line in that: each group (source, GPU, precision and model), each source, or each kind of runs that
        has intervals of its own; of these also the score of those alone that nothing was fitted to.
    """
    from megaloom.dsl.show.printing import show
    from megaloom.planner.validate import scoreboard
    from megaloom.planner.validate.scoring import as_json as written
    from megaloom.planner.validate.scoring import validate as scored

    found = scored(file, *files)
    if as_json:
        json.dump(written(found), sys.stdout, indent=1)
        print()
    elif markdown:
        print(scoreboard.markdown(found, scoreboard.By(by)))
    else:
        show(scoreboard.board(found), sys.stdout)
