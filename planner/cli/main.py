"""`plan`: the command that finds a layout. It never loads torch, and loads the planner only when it plans.

Exit codes: 0, 2 for what the user can mend (said on stderr), 130 when interrupted: then with the best so far, if any.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import cleandoc
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from attrs import asdict, field, frozen, make_class
from cyclopts import App, ArgumentCollection, CoercionError, CycloptsError, Parameter

from megaloom.planner.contract.choices import ModuleSet, OverlapSet, Recompute, Shard
from megaloom.planner.contract.layout import FIELDS, LayoutField
from megaloom.planner.contract.workload import Precision, Runtime, Workload

if TYPE_CHECKING:
    from megaloom.planner.contract.devices import Cluster


F = TypeVar("F", bound=Callable[..., object])


def whole(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuse 1.5 for a whole number, which cyclopts would round."""
    for argument in arguments:
        for token in argument.tokens:
            if argument.hint in (int, int | None) and "." in token.value:
                raise CoercionError(argument=argument, token=token, target_type=int)


def share(kind: type, tokens: Sequence[Any]) -> float:
    """A share of the whole, from `10%` or `0.1`."""
    text = tokens[0].value
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise CoercionError(msg=f"{text!r} is no share of the memory: 10% or 0.1 is", token=tokens[0], target_type=kind)
    return value


def listed(kind: type, tokens: Sequence[Any]) -> tuple[str, ...]:
    """Names with commas or spaces between; none are none."""
    names = tuple(name for token in tokens for name in token.value.split(",") if name)
    return () if names == ("none",) else names


def flowing(command: F) -> F:
    """The command, each paragraph of its help one line, for a terminal of any width to fold."""
    head, mark, rest = cleandoc(command.__doc__ or "").partition("Parameters\n----------")
    head = re.sub(r"(?<=\S)\n(?=\S)", " ", head)
    rest = re.sub(r"(?m)^    .*(?:\n    .*)+$", lambda lines: "    " + " ".join(lines[0].split()), rest)
    command.__doc__ = head + mark + rest
    return command


app = App(
    name="plan",
    usage="Usage: plan MODEL [OPTIONS]",
    help="Find the best layout of a model over a cluster, say why, and write it as a plan that `megaloom train` runs.",
    version_flags=[],
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # `main` says so
    config=whole,
)
app["--help"].group = "Parameters"


HINTS: dict[type, Any] = {
    int: int,
    bool: bool,
    Recompute: Recompute,
    Shard: bool,
    ModuleSet: tuple[str, ...],
    OverlapSet: tuple[str, ...],
}
"""The types of command-line options, by those of layout fields."""


def _option(spec: LayoutField) -> Any:
    """Return a layout field as a command-line option."""
    parameter: dict[str, Any] = {"name": spec.flag, "help": spec.help}
    if spec.kind in (ModuleSet, OverlapSet):
        parameter |= {"consume_multiple": True, "negative": ""}
    if spec.kind is OverlapSet:
        parameter["converter"] = listed
    hint: Any = Annotated[HINTS[spec.kind] | None, Parameter(**parameter)]
    return field(default=None, type=hint)


if TYPE_CHECKING:

    @frozen
    class Fixed:
        """Fields of the layout that the user has fixed; None for the others."""
else:
    Fixed = Parameter(name="*", group="Fix a part of the layout (what is not given is searched)")(
        make_class("Fixed", {name: _option(spec) for name, spec in FIELDS.items()}, frozen=True, kw_only=True)
    )

FREE = Fixed()


def given(fixed: Fixed) -> dict[str, Any]:
    """Return the layout fields that the user has fixed."""
    values = {name: value for name, value in asdict(fixed, recurse=False).items() if value is not None}
    return {name: Shard(value) if name == "shard" else value for name, value in values.items()}


@app.default
@flowing
def plan(
    model: str | None = None,
    /,
    *,
    gpus: str = "8xH100",
    seq: int | None = None,
    batch: int | None = None,
    precision: Precision = Precision.BF16,
    runtime: Runtime = Runtime.MEGALOOM,
    fixed: Fixed = FREE,
    memory_headroom: Annotated[float, Parameter(converter=share)] = 0.05,
    lint: Annotated[bool, Parameter(negative="")] = False,
    pareto: Annotated[bool, Parameter(negative="")] = False,
    top: int = 5,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    output: Annotated[str | None, Parameter(name=["-o", "--output"])] = None,
    html: str | None = None,
    trace: str | None = None,
) -> int | None:
    """Find the best layout of a model over a cluster, say why, and write it as a plan that `megaloom train` runs.

    Parameters
    ----------
    model
        file.py:name, a file.py with one model, package.module:name, one of the examples (llama3-8b), or a Hugging Face
        config.json.
    gpus
        How many of which device: 64xH100; 8..4096xH100 shows how the model scales. Known: A100, A100-40GB, A800,
        A100-PCIe, A100-PCIe-40GB, V100, H100, H800, H200, B200, B300, GB200, GB300, CPU. Or a cluster's file:
        64xours.toml, or the profile that `megaloom measure` writes.
    seq
        Tokens a sequence. [default: 4096, or what the model's learned positions allow]
    batch
        Sequences a step, over all devices. [default: 8 a device, fewer beyond 128 devices]
    precision
        What activations and matrix products are computed in.
    runtime
        What runs the plan: megaloom's own runtime, or Megatron-core with Transformer Engine, as in Megatron-LM, NeMo
        and Megatron-Bridge, for which the plan is exported.
    memory_headroom
        What a plan leaves free of each device: 10%.
    lint
        Search nothing: say which rules the layout given breaks; without one, or a model, which rules there are.
    pareto
        Show what less memory costs: of all layouts those than which none is both quicker and leaner.
    top
        How many layouts to show: each deals the devices in another way to dp, tp, pp, cp, ep and etp, of which it is
        the best.
    as_json
        Print JSON for machines and nothing else; no plan is written without -o.
    output
        Where the plan is written. [default: plan.json]
    html
        Where a page with pictures of the plan is written: its timeline, memory, step, devices and rivals.
    trace
        Where the predicted step is written as a trace for ui.perfetto.dev; compressed if the name ends in .gz.
    """
    from megaloom.dsl.catalog import find
    from megaloom.dsl.errors import UserError
    from megaloom.dsl.graph import graph
    from megaloom.dsl.hf.architectures import WANTED
    from megaloom.planner.contract.plans import save
    from megaloom.planner.hardware.cluster_names import cluster, is_row

    from .plan_command import (
        default_batch,
        default_seq,
        ruled,
        scale,
        searched,
        tell,
        told,
    )

    if top < 1:
        raise UserError(f"--top {top} shows nothing\ngive at least 1")
    if model is None:
        if lint and not given(fixed):
            return ruled(as_json)
        raise UserError(f"MODEL requires an argument\n{WANTED}")
    declared, ref = find(model)

    def work(machine: Cluster) -> Workload:
        return Workload(
            seq=default_seq(graph(declared)) if seq is None else seq,
            batch=default_batch(machine) if batch is None else batch,
            precision=precision,
        )

    if lint:
        machine = cluster(gpus)
        return told(graph(declared), machine, work(machine), given(fixed), as_json)
    if pareto or is_row(gpus):
        if written := [f"{name} {to}" for name, to in (("-o", output), ("--html", html), ("--trace", trace)) if to]:
            what = "--pareto" if pareto else f"a row of clusters, {gpus},"
            raise UserError(f"{what} makes no plan, so there is none for {written[0]}\ngive one cluster, as 64xH100")
        scale(declared, gpus, work, given(fixed), memory_headroom, runtime, pareto, as_json)
        return None
    machine = cluster(gpus)
    found = searched(declared, machine, work(machine), ref, given(fixed), memory_headroom, runtime)
    target = output or ("" if as_json else "plan.json")
    if target:
        save(found.best, target)
    if html or trace:
        from megaloom.planner.report.html import save_page_and_trace

        save_page_and_trace(found.best, declared, html, trace, found)
    if as_json:
        from megaloom.dsl.facts.parameters import params
        from megaloom.planner.report.to_json import search_json

        print(json.dumps(search_json(found, top, params(declared)), indent=1))
    else:
        assumed = [name for name, value in (("--seq", seq), ("--batch", batch)) if value is None]
        tell(found, declared, top, assumed, target)
        for picture in filter(None, (html, trace)):
            print(f"wrote {picture}")
    return None if found.gap is None else 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code. Errors that the user can mend go to stderr, without a traceback."""
    try:
        with uncollected():
            return written(lambda: app(argv, exit_on_error=False, print_error=False, result_action="return_value"))
    except CycloptsError as error:
        return _fail(f"{error}\n`plan --help` lists what can be given")
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except ValueError as error:
        from megaloom.dsl.errors import UserError, full_message

        if not isinstance(error, UserError):
            raise
        return _fail(full_message(error))


@contextmanager
def uncollected() -> Iterator[None]:
    """Without looking for cycles, of which a search makes hardly any: that takes a tenth of its time."""
    was = gc.isenabled()
    atexit.register(gc.freeze)  # so that the end of the process does not look either
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def written(command: Callable[[], int | None]) -> int:
    """A command's exit code, when all of its output is written. UserError where that cannot be.

    0 if whoever reads it has seen enough. Without a stdout or stderr (`>&-`) nobody does.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    try:
        code = command() or 0
        sys.stdout.flush()
        return code
    except SystemExit as stop:
        if not isinstance(stop.__context__, BrokenPipeError):  # which rich has made of it
            raise
        return 0
    except OSError as error:
        if error.filename:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still in the buffer
        if isinstance(error, BrokenPipeError):
            return 0
        from megaloom.dsl.errors import UserError

        raise UserError(f"cannot write the output: {error.strerror}") from None


def _fail(message: str, code: int = 2) -> int:
    print(f"plan: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
