"""`megaloom export`: a plan in the words of another program. It never loads torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from .export.export import Target

if TYPE_CHECKING:
    from megaloom.dsl.graph import Model

    from .plan import Plan


def export(
    plan: str,
    /,
    *,
    to: Target,
    whole_layers: Annotated[bool, Parameter(negative="")] = False,
    output: Annotated[Path | None, Parameter(name=["-o", "--output"])] = None,
) -> None:
    """Write a plan in the words of another program; what that cannot express is refused by its name.

    Parameters
    ----------
    plan
        A plan.json.
    to
        The program: a script for Megatron-LM, overrides for Megatron-Bridge, a YAML for Accelerate, a TOML for
        torchtitan, or a script for sbatch that runs `megaloom train`.
    whole_layers
        Cut the model between whole layers first, as other programs do, where the plan cuts inside of one.
    output
        The file to write. [default: standard output]
    """
    from megaloom.dsl.errors import UserError
    from megaloom.dsl.find import find

    from .export.export import export as exported
    from .plan import check, load

    asked = load(plan)
    declared, _ = find(asked.model)
    check(asked, declared)
    asked = _recut(asked, declared, to) if whole_layers and to is not Target.SLURM else asked
    text = exported(asked, declared, to, plan)
    if output is None:
        sys.stdout.write(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to {output}: {error.strerror}\ngive a path in a folder that exists") from None


def _recut(plan: Plan, model: Model, to: Target) -> Plan:
    """The plan with stages of whole layers, and on stderr what that is predicted to cost."""
    from megaloom.dsl.graph import graph

    from .export.borders import whole
    from .export.gpt import gpt

    made = whole(plan, model, gpt(graph(model), to.value))
    if made is plan:
        return plan
    before, after = plan.predicted.step_seconds, made.predicted.step_seconds
    print(f"cut at whole layers: {after:.3g} s a step predicted, {before:.3g} s as planned", file=sys.stderr)
    return made
