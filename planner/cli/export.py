"""The command `megaloom export`, which writes a plan as a file for another program. It never loads torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from megaloom.planner.contract.workload import Runtime
from megaloom.planner.export.target import ON_MEGATRON_CORE, Target


def export(
    plan: str,
    /,
    *,
    to: Target,
    output: Annotated[Path | None, Parameter(name=["-o", "--output"])] = None,
) -> None:
    """Write a plan as a script or configuration file for another program.

    What the program cannot express is refused, with advice. Other programs need pipeline stages of whole layers: if a
    stage of the plan begins inside of a layer, the stages are balanced again, and the new step time is shown.

    Parameters
    ----------
    plan
        A plan.json.
    to
        The program: megatron-lm (a shell script), megatron-bridge (a Python script), accelerate (a YAML file),
        torchtitan (a TOML file of 0.2.2), torchtitan-0-3 (a Python module), slurm (a job for sbatch that runs
        `megaloom train`, or Megatron-LM if the plan was made with --runtime megatron), kubernetes (a PyTorchJob) and
        skypilot (a task) that run `megaloom train`.
    output
        The file to write. [default: standard output]
    """
    from megaloom.dsl.errors import UserError
    from megaloom.dsl.files.outputs import check_output_file
    from megaloom.planner.contract.plan_json import load
    from megaloom.planner.contract.planned_model import planned_model
    from megaloom.planner.export.export import cut_for, export_plan
    from megaloom.planner.rules.plan_check import check_plan

    check_output_file(output, "-o")
    planned = load(plan)
    declared = planned_model(planned)
    check_plan(planned, declared)
    exported = cut_for(to, planned, declared)
    text = export_plan(exported, declared, to, plan)
    if exported is not planned:
        after, before = exported.predicted.step_seconds, planned.predicted.step_seconds
        print(
            "partitioned the stages again, between whole layers: "
            f"the predicted step is {after:.4g} s instead of {before:.4g} s",
            file=sys.stderr,
        )
    if planned.runtime is Runtime.MEGALOOM and to in ON_MEGATRON_CORE:
        print(
            f"the predicted step is that of `megaloom train`; for {to.program}, `plan --runtime megatron` searches "
            "with the kernels of Megatron-core",
            file=sys.stderr,
        )
    if output is None:
        sys.stdout.write(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}\ngive a path in a folder that exists") from None
    print(f"wrote {output}", file=sys.stderr)
