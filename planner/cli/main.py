"""The command `plan`, which finds a layout. It never loads torch, and loads the planner only when it plans.

Exit codes: 0; 1 for a layout (`--lint`) or a read run (`--from`) that breaks a rule; 2 for an error that the user can
correct, printed on stderr; 130 when interrupted, with the best plan so far if there is one.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from attrs import frozen
from cyclopts import App, CycloptsError, Parameter

from .adapter_options import NO_CHANGES, ModelChanges
from .arguments import NOTHING_FIXED, FixedLayout, fixed_fields, reject_rounded, unwrap_help, usage_error
from .plan_options import DEFAULT_JOB, DEFAULT_RESULT, JobOptions, ResultOptions
from .process import cyclic_gc_disabled, run_and_flush
from .run_options import NO_RUN, RunOptions
from .settings import model_arguments, options_of_settings
from .versions import VERSION_HELP, installed_versions

if TYPE_CHECKING:
    from megaloom.dsl.graph import Model
    from megaloom.planner.report.token_budget import TokenBudget
    from megaloom.planner.search.variant_choices import FixedAxes

app = App(
    name="plan",
    usage="Usage: plan MODEL [OPTIONS]\n       plan --from RUN [OPTIONS] [-- ARGUMENTS]",
    help="Find the fastest layout of a model on a cluster, explain it, and write it to a plan file.",
    version=installed_versions,
    version_flags=["--version"],
    version_format="plaintext",
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # `main` prints the message
    config=[options_of_settings, reject_rounded],
)
app["--help"].group = app["--version"].group = "Parameters"
app["--version"].help = VERSION_HELP

_MEGALOOM_COMMANDS = (
    "calibrate",
    "compare",
    "explain",
    "export",
    "measure",
    "pack",
    "show",
    "train",
    "unpack",
    "verify",
)


@app.default
@unwrap_help
def find_plan(
    model: str | None = None,
    /,
    *more: Annotated[str, Parameter(show=False)],
    run: Annotated[RunOptions, Parameter(name="*")] = NO_RUN,
    job: Annotated[JobOptions, Parameter(name="*")] = DEFAULT_JOB,
    changes: Annotated[ModelChanges, Parameter(name="*")] = NO_CHANGES,
    fixed: FixedLayout = NOTHING_FIXED,
    result: Annotated[ResultOptions, Parameter(name="*")] = DEFAULT_RESULT,
) -> int | None:
    """Find the fastest layout of a model on a cluster, explain it, and write it to a plan file.

    `megaloom train` trains by the plan, `megaloom export` writes it for other programs. With `--from`, read a run that
    exists, and say what is wrong with it, how far it is from the best layout, and which flags matter.

    Parameters
    ----------
    model
        One of the examples (llama3-8b), file.py:name, a file.py that declares one model, package.module:name, or a
        Hugging Face config.json.
    """
    from megaloom.dsl.catalog import find
    from megaloom.dsl.errors import UserError
    from megaloom.dsl.hf.architectures import WANTED

    from .actions import print_rules

    result.check()
    result.cost.check_searched(lint=result.lint, pareto=result.pareto)
    budget, chosen = result.cost.budget(), fixed_fields(fixed)
    positional = (() if model is None else (model,)) + more
    if run.path is not None:
        from .second_opinion import check_alone, print_opinion

        check_alone(job, chosen, result)
        return print_opinion(run, job, result, positional, changes.words, budget)
    if more:
        if model in _MEGALOOM_COMMANDS:
            raise UserError(f"{model} is a command of megaloom\nuse megaloom {shlex.join(positional)}")
        raise UserError(f"unexpected argument {more[0]!r:.80}\n`plan --help` lists the options")
    run.check_none()
    if model is None:
        if result.lint and not chosen:
            return print_rules(result.as_json)
        raise UserError(f"MODEL is missing\n{WANTED}")
    result.check_files()
    declared, ref = find(model, model_arguments(changes.words, changes.settings))
    declared = changes.adapters.added_to(declared, ref)
    return _plan_or_list(PlanRequest(declared, ref, job, chosen, result, budget))


@frozen
class PlanRequest:
    """A request for a plan: the model and its reference, the job, the layout's fixed fields, and what to print."""

    declared: Model
    ref: str
    job: JobOptions
    chosen: FixedAxes
    result: ResultOptions
    budget: TokenBudget | None


def _plan_or_list(request: PlanRequest) -> int | None:
    """Print the broken rules, the layouts of a range of clusters or the Pareto front if asked to; else plan."""
    from megaloom.dsl.graph import graph
    from megaloom.planner.hardware.cluster_names import cluster, is_range

    from .actions import print_lint, print_scaling

    declared, job, result = request.declared, request.job, request.result
    if result.lint:
        machine = cluster(job.cluster_name)
        workload = job.workload(declared, machine)
        return print_lint(graph(declared), machine, workload, request.chosen, result.as_json)
    if result.pareto or is_range(job.cluster_name):
        result.check_no_plan(job.cluster_name)
        print_scaling(declared, job, request.chosen, request.budget, pareto=result.pareto, as_json=result.as_json)
        return None
    return _plan(request)


def _plan(request: PlanRequest) -> int | None:
    """Search a plan, print it, and write its files. Return 130 if the search was interrupted."""
    from megaloom.planner.contract.plan_json import save
    from megaloom.planner.hardware.cluster_names import cluster

    from .actions import print_report, run_search

    declared, job, result = request.declared, request.job, request.result
    machine = cluster(job.cluster_name)
    workload = job.workload(declared, machine)
    found = run_search(declared, machine, workload, request.ref, request.chosen, job)
    path = result.output or ("" if result.as_json else "plan.json")
    if path:
        save(found.best, path)
    if result.html or result.trace:
        from megaloom.planner.report.html import save_page_and_trace

        save_page_and_trace(found.best, declared, result.html, result.trace, found)
    if result.as_json:
        from megaloom.dsl.facts.parameters import params
        from megaloom.planner.report.to_json import search_json

        print(json.dumps(search_json(found, result.top, params(declared), request.budget), indent=1))
    else:
        print_report(found, declared, result.top, job.assumed, path, request.budget)
        for picture in filter(None, (result.html, result.trace)):
            print(f"wrote {picture}")
    return None if found.gap is None else 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. Errors that the user can correct are printed without a traceback."""
    try:
        with cyclic_gc_disabled():
            return run_and_flush(
                lambda: app(argv, exit_on_error=False, print_error=False, result_action="return_value")
            )
    except CycloptsError as error:
        words = sys.argv[1:] if argv is None else list(argv)
        if words[0] in _MEGALOOM_COMMANDS:
            return _fail(f"{words[0]} is a command of megaloom\nuse megaloom {shlex.join(words)}")
        return _fail(f"{usage_error(error)}\n`plan --help` lists the options")
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except ValueError as error:
        from megaloom.dsl.errors import UserError, full_message

        if not isinstance(error, UserError):
            raise
        return _fail(full_message(error))


def _fail(message: str, code: int = 2) -> int:
    from megaloom.dsl.quoting import shown_message

    print(f"plan: {shown_message(message)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
