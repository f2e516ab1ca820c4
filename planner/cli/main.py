"""The command `plan`, which finds a layout. It never loads torch, and loads the planner only when it plans.

Exit codes: 0; 2 for an error that the user can correct, printed on stderr; 130 when interrupted, with the best plan so
far if there is one.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, CycloptsError, Parameter

from megaloom.planner.contract.known_devices import MEMORY
from megaloom.planner.contract.workload import Precision, Runtime, Workload

from .adapter_options import ADAPTERS, NO_ADAPTERS, AdapterOptions
from .arguments import NOTHING_FIXED, FixedLayout, fixed_fields, parse_share, reject_rounded, unwrap_help, usage_error
from .process import cyclic_gc_disabled, run_and_flush
from .settings import SetOption, SettingsOption, model_arguments, options_of_settings
from .versions import VERSION_HELP, installed_versions

if TYPE_CHECKING:
    from megaloom.planner.contract.devices import Cluster

app = App(
    name="plan",
    usage="Usage: plan MODEL [OPTIONS]",
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
_GPUS_HELP = (
    "Number and kind of devices: 64xH100. A range, 8..4096xH100, prints a scaling table. "
    f"Known: {', '.join(MEMORY)}. For another cluster, give a cluster file, 64xours.toml, "
    "or the profile that `megaloom measure` writes."
)


@app.default
@unwrap_help
def find_plan(
    model: str | None = None,
    /,
    *,
    gpus: Annotated[str, Parameter(help=_GPUS_HELP)] = "8xH100",
    words: SetOption = [],  # noqa: B006
    settings: SettingsOption = None,
    seq: int | None = None,
    batch: int | None = None,
    precision: Precision = Precision.BF16,
    runtime: Runtime = Runtime.MEGALOOM,
    fixed: FixedLayout = NOTHING_FIXED,
    adapters: Annotated[AdapterOptions, ADAPTERS] = NO_ADAPTERS,
    memory_headroom: Annotated[float, Parameter(converter=parse_share)] = 0.05,
    lint: Annotated[bool, Parameter(negative="")] = False,
    pareto: Annotated[bool, Parameter(negative="")] = False,
    top: int = 5,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    output: Annotated[str | None, Parameter(name=["-o", "--output"])] = None,
    html: str | None = None,
    trace: str | None = None,
) -> int | None:
    """Find the fastest layout of a model on a cluster, explain it, and write it to a plan file.

    `megaloom train` trains by the plan, `megaloom export` writes it for other programs.

    Parameters
    ----------
    model
        One of the examples (llama3-8b), file.py:name, a file.py that declares one model, package.module:name, or a
        Hugging Face config.json.
    seq
        Tokens per sequence. [default: 4096, or fewer if the model has fewer learned positions]
    batch
        Global batch: sequences per step, over all devices. [default: 8 per device, fewer beyond 128 devices]
    precision
        Number format of activations and matrix products.
    runtime
        Program that will run the plan: megaloom (`megaloom train`), or megatron (Megatron-core with Transformer
        Engine, as in Megatron-LM, NeMo and Megatron-Bridge; see `megaloom export`).
    memory_headroom
        Share of each device's memory that a plan leaves free, such as 10%.
    lint
        Search nothing. List the rules that the given layout breaks; without a layout, list all rules.
    pareto
        Print the Pareto front of step time against memory. No plan is written.
    top
        Number of layouts to show, each on a different device mesh (tp, pp, cp, ep, etp, dp).
    as_json
        Print JSON only. No plan is written without -o.
    output
        File for the plan. [default: plan.json]
    html
        File for a web page of the plan: step time, timeline, memory, devices, and other layouts.
    trace
        File for a Chrome trace of the predicted step, for ui.perfetto.dev; compressed if its name ends in .gz.
    """
    from megaloom.dsl.catalog import find
    from megaloom.dsl.errors import UserError
    from megaloom.dsl.files.outputs import check_output_file
    from megaloom.dsl.graph import graph
    from megaloom.dsl.hf.architectures import WANTED
    from megaloom.planner.contract.plan_json import save
    from megaloom.planner.hardware.cluster_names import cluster, is_range

    from .actions import default_batch, default_seq, print_lint, print_report, print_rules, print_scaling, run_search

    if top < 1:
        raise UserError(f"--top must be at least 1, got {top}")
    chosen = fixed_fields(fixed)
    if model is None:
        if lint and not chosen:
            return print_rules(as_json)
        raise UserError(f"MODEL is missing\n{WANTED}")
    for flag, place in (("-o", output), ("--html", html), ("--trace", trace)):
        check_output_file(place, flag)
    declared, ref = find(model, model_arguments(words, settings))
    declared = adapters.added_to(declared, ref)

    def workload(machine: Cluster) -> Workload:
        return Workload(
            seq=default_seq(graph(declared)) if seq is None else seq,
            batch=default_batch(machine) if batch is None else batch,
            precision=precision,
        )

    if lint:
        machine = cluster(gpus)
        return print_lint(graph(declared), machine, workload(machine), chosen, as_json)
    if pareto or is_range(gpus):
        for flag, path in (("-o", output), ("--html", html), ("--trace", trace)):
            if path:
                what = "`--pareto` prints the Pareto front" if pareto else f"`--gpus {gpus}` prints a scaling table"
                instead = "`--pareto`" if pareto else "name one cluster"
                raise UserError(f"{what} and writes no plan\ndrop `{flag}`, or {'drop ' if pareto else ''}{instead}")
        print_scaling(declared, gpus, workload, chosen, memory_headroom, runtime, pareto, as_json)
        return None
    machine = cluster(gpus)
    found = run_search(declared, machine, workload(machine), ref, chosen, memory_headroom, runtime)
    path = output or ("" if as_json else "plan.json")
    if path:
        save(found.best, path)
    if html or trace:
        from megaloom.planner.report.html import save_page_and_trace

        save_page_and_trace(found.best, declared, html, trace, found)
    if as_json:
        from megaloom.dsl.facts.parameters import params
        from megaloom.planner.report.to_json import search_json

        print(json.dumps(search_json(found, top, params(declared)), indent=1))
    else:
        assumed = [name for name, value in (("--seq", seq), ("--batch", batch)) if value is None]
        print_report(found, declared, top, assumed, path)
        for picture in filter(None, (html, trace)):
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
