"""`megaloom`: train, verify, plan, show, measure. torch and megatron-core are loaded only where something is run.

Exit codes: 0; 1 for a failed verification or a rank that died; 2 for what the user can mend; 130 and 143 when stopped
by SIGINT and SIGTERM. What went wrong is said on stderr, once and without a traceback.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from attrs import asdict
from cyclopts import App, CycloptsError, Parameter

from megaloom.dsl.errors import UserError, full_message
from megaloom.planner.cli.arguments import NOTHING_FIXED, FixedLayout, fixed_fields, reject_fractions, unwrap_help
from megaloom.planner.cli.explain import explain
from megaloom.planner.cli.export import export
from megaloom.planner.cli.main import app as planning
from megaloom.planner.cli.process import run_and_flush
from megaloom.planner.cli.validate import validate
from megaloom.planner.contract.choices import Shard
from megaloom.planner.contract.layout import flag_of
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.runtime.training.recipe import Recipe

from .measure import measure

if TYPE_CHECKING:
    from rich.console import RenderableType

    from megaloom.planner.contract.plans import Plan

app = App(
    name="megaloom",
    help="Declare a model, plan how to lay it over devices, train it that way.",
    version_flags=[],
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # `main` says so
    config=reject_fractions,
)
app["--help"].group = "Parameters"
app.command(planning, name="plan")
for command in (validate, measure, explain, export):
    app.command(unwrap_help(command))

MAIN = "stdlib-gpt"
SEQ, BATCH = 128, 32
STDLIB = "stdlib"
RECIPE = Recipe()


@app.command
@unwrap_help
def train(
    model: str = MAIN,
    /,
    *,
    data: str = STDLIB,
    seq: int | None = None,
    batch: int | None = None,
    precision: Precision | None = None,
    devices: int | None = None,
    out: Path | None = None,
    save_every: int = 100,
    evaluate_every: int = 100,
    recipe: Annotated[Recipe, Parameter(name="*", group="Recipe")] = RECIPE,
    fixed: FixedLayout = NOTHING_FIXED,
) -> int:
    """Plan a model for this machine, or take a plan, and train it on text. Run again, it goes on where it was.

    Parameters
    ----------
    model
        A plan.json, or a model: file.py:name, a file.py with one model, package.module:name, one of the examples, or a
        Hugging Face config.json.
    data
        "stdlib" (the text of Python's standard library), or a file or a folder of text.
    seq
        Tokens a sequence. [default: 128]
    batch
        Sequences a step, over all devices. [default: 32]
    precision
        What activations and matrix products are computed in. [default: bf16 on GPUs, fp32 without]
    devices
        How many devices to use. [default: all GPUs; 4 processes without]
    out
        The folder of the run's checkpoints and metrics. [default: runs/MODEL]
    save_every
        Steps between checkpoints.
    evaluate_every
        Steps between evaluations on held-out text.
    """
    from megaloom.dsl.catalog import file_name
    from megaloom.dsl.hf.architectures import describes

    load = {"seq": seq, "batch": batch, "precision": precision, "devices": devices}
    asked = {name: value for name, value in {**load, **fixed_fields(fixed)}.items() if value is not None}
    plan = _given(model, asked) if model.endswith(".json") and not describes(model) else _planned(model, load, fixed)
    folder = out or Path("runs") / file_name(plan.model)
    options = {"data": data, "out": out, **asked, **asdict(recipe), "steps": recipe.steps}

    from megaloom.planner.contract.capability import differences
    from megaloom.runtime.megatron.environment import current_environment
    from megaloom.runtime.training.run import train as run

    from .report import planned, summary

    note = differences(plan.environment, current_environment())
    _print(planned(plan), *([note] if note else []))
    try:
        done = run(plan, recipe, folder=folder, source=data, save_every=save_every, evaluate_every=evaluate_every)
    except KeyboardInterrupt:
        return _fail(f"stopped; {_left(folder)}", 130)
    except SystemExit as stop:  # the signals that end a process
        return _fail(f"stopped; {_left(folder)}", int(stop.code or 0))
    if done.stopped:  # as one of many ranks, where the signal was not for this process alone; or nobody reads on
        return _fail(f"stopped; {_left(folder)}", 128 + done.stopped)
    options["steps"] = 2 * max(recipe.steps, done.step)
    _print(summary(done, plan), f"\nto go on: {_command(model, options)}")
    return 0


@app.command
@unwrap_help
def verify(plan: Path, /, *, steps: int = 3, seed: int = 1234) -> int:
    """Run a plan and one process from the same seed on the same tokens, and compare. Exit code 1 if they differ.

    Parameters
    ----------
    plan
        A plan.json.
    steps
        Optimizer steps.
    seed
        Of the initial weights and the tokens.
    """
    from megaloom.planner.contract.plans import load
    from megaloom.runtime.training.verify import compare

    from .report import comparison

    asked = load(plan)
    found = compare(asked, steps=steps, seed=seed)
    _print(comparison(found, asked))
    return 0 if found.passed else 1


@app.command
@unwrap_help
def show(
    model: str,
    /,
    *,
    seq: int | None = None,
    batch: int = 1,
    source: int | None = None,
    precision: Precision = Precision.BF16,
    svg: Path | None = None,
    html: Path | None = None,
) -> None:
    """Print a model as a tree, repeats folded, with the shape, parameters, FLOPs and saved activations of each layer.

    Parameters
    ----------
    model
        file.py:name, a file.py with one model, package.module:name, one of the examples (llama3-8b), or a Hugging Face
        config.json.
    seq
        Tokens a sequence. [default: 4096, or what the model's learned positions allow]
    batch
        Sequences.
    source
        Tokens of each sequence that an encoder reads. [default: as many as --seq]
    precision
        What activations are kept in.
    svg
        A file to draw the model to.
    html
        A file for a page with the drawing and the table.
    """
    from megaloom.dsl.catalog import find
    from megaloom.dsl.facts.positions import longest
    from megaloom.dsl.graph import graph
    from megaloom.dsl.show.outline import outline
    from megaloom.dsl.show.table import report
    from megaloom.dsl.show.tree import guides

    declared, _ = find(model)
    tokens = min(4096, longest(graph(declared)).get("seq", 4096)) if seq is None else seq
    found = outline(declared, batch=batch, seq=tokens, source=source, element=precision.nbytes)
    if svg or html:
        from megaloom.dsl.show.html import save

        save(found, precision, svg, html)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    wrote = (f"wrote {path}" for path in (svg, html) if path)
    _print(report(found, precision, guides(sys.stdout.encoding), width), *wrote)


def _left(folder: Path) -> str:
    """What a run that was stopped leaves behind."""
    from megaloom.runtime.training import checkpoint

    last = checkpoint.folders(folder)[-1:]
    return f"{last[0]} is saved, and the same command goes on from there" if last else "nothing was saved yet"


def _given(path: str, asked: Mapping[str, Any]) -> Plan:
    """The plan of a file, which nothing is left to say about."""
    from megaloom.dsl.catalog import find
    from megaloom.planner.contract.plans import load
    from megaloom.planner.rules.plan_check import check_plan

    plan = load(path)
    check_plan(plan, find(plan.model)[0])
    if asked:
        flags = ", ".join(flag_of(name) for name in asked)
        raise UserError(
            f"{path} is a plan, and has settled {flags}\nleave that out, or name the model instead of the plan"
        )
    return plan


def _planned(model: str, load: Mapping[str, Any], fixed: FixedLayout) -> Plan:
    """The best plan of a model for the devices at hand."""
    from megaloom.dsl.catalog import find
    from megaloom.planner.hardware.cluster_names import cluster
    from megaloom.planner.search.search import plan as search

    declared, ref = find(model)

    from megaloom.runtime.megatron import device

    workload = Workload(
        seq=SEQ if load["seq"] is None else load["seq"],
        batch=BATCH if load["batch"] is None else load["batch"],
        precision=load["precision"] or (Precision.BF16 if device.gpus() else Precision.FP32),
    )
    return search(declared, cluster(_devices(load["devices"])), workload, ref=ref, fixed=fixed_fields(fixed)).best


def _devices(count: int | None) -> str:
    """The cluster at hand, such as 4xCPU: this machine's, or all ranks of the job that this process is one of."""
    import torch.distributed as dist

    from megaloom.runtime.launch import launcher
    from megaloom.runtime.launch.rendezvous import inside, join
    from megaloom.runtime.megatron import device

    if inside():
        join(count)
        count = dist.get_world_size()
    elif count is not None:
        launcher.check(count)
    name = device.cluster_here()
    return name if count is None else f"{count}x{name.partition('x')[2]}"


def _print(*parts: RenderableType) -> None:
    """To stdout, from the first rank alone; nothing stays in a buffer that ranks would inherit."""
    from rich.console import Group

    from megaloom.dsl.show.printing import show

    if not int(os.environ.get("RANK", 0)):
        show(Group(*parts), sys.stdout)
        sys.stdout.flush()


def _command(model: str, options: Mapping[str, Any]) -> str:
    """The command line that says these options, those that are not as usual."""
    usual = {**asdict(RECIPE), "data": STDLIB, "steps": None}
    said = [part for name, value in options.items() if value != usual.get(name) for part in _flag(name, value)]
    program = "megaloom" if shutil.which("megaloom") else os.path.relpath(sys.argv[0])
    return shlex.join([program, "train", *([] if model == MAIN else [model]), *said])


def _flag(name: str, value: object) -> tuple[str, ...]:
    flag = flag_of(name)
    if isinstance(value, bool | Shard):
        return (flag if value else f"--no-{flag.removeprefix('--')}",)
    return (flag, *(value or ("none",))) if isinstance(value, tuple) else (flag, str(value))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    try:
        return run_and_flush(lambda: app(argv, exit_on_error=False, print_error=False, result_action="return_value"))
    except CycloptsError as error:
        return _fail(f"{error}\n`megaloom --help` lists the commands, `megaloom COMMAND --help` what each can be given")
    except UserError as error:
        return _fail(full_message(error))
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except RuntimeError as error:
        if type(error).__name__ != "RankError":
            raise
        return _fail(str(error), 1)


def _fail(message: str, code: int = 2) -> int:
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)  # a rank that was killed in the midst of its display hid the cursor
    print(f"megaloom: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
