"""`megaloom export`: a plan in the words of another program. It never loads torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from megaloom.planner.export.export import Target


def export(
    plan: str,
    /,
    *,
    to: Target,
    output: Annotated[Path | None, Parameter(name=["-o", "--output"])] = None,
) -> None:
    """Write a plan in the words of another program; what that cannot express is refused by its name.

    Other programs cut a model between whole layers: stages that begin inside of one are cut anew, and what that costs
    is said.

    Parameters
    ----------
    plan
        A plan.json.
    to
        The program: a script for Megatron-LM, overrides for Megatron-Bridge, a YAML for Accelerate, a TOML for
        torchtitan, or a script for sbatch that runs `megaloom train`, or Megatron-LM if the plan is for that.
    output
        The file to write. [default: standard output]
    """
    from megaloom.dsl.catalog import find
    from megaloom.dsl.errors import UserError
    from megaloom.planner.contract.plans import check, load
    from megaloom.planner.export.export import export as exported
    from megaloom.planner.export.export import whole

    asked = load(plan)
    declared, _ = find(asked.model)
    check(asked, declared)
    made = whole(asked, declared, to)
    text = exported(made, declared, to, plan)
    if made is not asked:
        after, before = made.predicted.step_seconds, asked.predicted.step_seconds
        print(f"cut at whole layers: {after:.4g} s a step predicted, {before:.4g} s as planned", file=sys.stderr)
    if output is None:
        sys.stdout.write(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to {output}: {error.strerror}\ngive a path in a folder that exists") from None
