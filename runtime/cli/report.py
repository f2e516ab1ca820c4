"""What the command shows, as things for rich to print: a plan before it runs, what a run came to, a comparison."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megaloom.dsl.catalog import find
from megaloom.dsl.facts.parameters import params
from megaloom.planner.contract.plans import Plan
from megaloom.planner.report.tables import layout_table, prediction_table
from megaloom.planner.report.units import memory_unit, peak_memory
from megaloom.runtime.megatron import device
from megaloom.runtime.training.loop import Summary
from megaloom.runtime.training.metrics import clock
from megaloom.runtime.training.verify import Comparison


def planned(plan: Plan) -> RenderableType:
    """A plan before it runs: layout, predictions, reasons."""
    model, _ = find(plan.model)
    return Group(
        Text(f"{model.name}: {params(model):,} parameters on {plan.cluster}\n"),
        layout_table(plan),
        Text(),
        prediction_table(plan),
        Text("\nWhy", "bold"),
        *(Padding(Text(reason), (0, 0, 0, 2)) for reason in plan.reasons),
        Text(),
    )


def summary(done: Summary, plan: Plan) -> RenderableType:
    """What a run came to, its predictions beside."""
    steps = f"{done.step:,}" + (f" (resumed from {done.resumed:,})" if done.resumed else "")
    rows = [("steps", steps)]
    if done.step_seconds and done.train_loss is not None:
        told, rate = plan.predicted, plan.workload.tokens / done.step_seconds / plan.layout.world
        mfu = told.mfu * told.step_seconds / done.step_seconds  # the same FLOPs in another time
        rows += [
            ("tokens", f"{done.tokens:,} in {clock(done.seconds)}"),
            ("step", f"{done.step_seconds:.3f} s (predicted {told.step_seconds:.3f} s)"),
            ("tokens/s/device", f"{rate:,.0f} (predicted {told.tokens_per_second_per_device:,.0f})"),
            ("MFU", f"{mfu:.1%} (predicted {told.mfu:.1%})"),
            ("training loss", f"{done.train_loss:.3f} nats a byte, over the last steps"),
        ]
    if done.held_out_loss is not None:
        bits = done.held_out_loss / math.log(2)
        rows += [("held-out loss", f"{done.held_out_loss:.3f} nats a byte, {bits:.3f} bits")]
    rows += [
        ("unigram entropy", f"{done.unigram_entropy:.3f} nats a byte of held-out text: what counting bytes can reach"),
        ("peak memory", _memory(done, plan)),
        ("checkpoint", str(done.checkpoint)),
    ]
    return Group(Text(), _pairs(rows))


def _memory(done: Summary, plan: Plan) -> str:
    size = memory_unit(plan)
    kind, what = ("allocated", "") if device.gpus() else ("device", ", a whole process with its libraries")
    return f"{size.of(max(done.peak_nbytes))} {size.name} (predicted {size.of(peak_memory(plan, kind))}){what}"


def comparison(found: Comparison, plan: Plan) -> RenderableType:
    """Both curves, their differences, and the verdict."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("step", "loss planned", "one process", "difference", "gradient norm", "one process", "difference"):
        table.add_column(name, justify="right")
    rows = zip(
        found.planned.losses,
        found.reference.losses,
        found.planned.grad_norms,
        found.reference.grad_norms,
        strict=True,
    )
    for step, (a, b, c, d) in enumerate(rows, 1):
        table.add_row(str(step), f"{a:.6f}", f"{b:.6f}", f"{a - b:+.1e}", f"{c:.6f}", f"{d:.6f}", f"{c - d:+.1e}")
    verdict = "the same" if found.passed else "NOT the same"
    return Group(
        Text(f"{plan.model} under {plan.layout}, and in one process\n"),
        table,
        Text(
            f"\n{verdict}: losses differ by {found.loss_error:.1e} at most, gradient norms by {found.norm_error:.1e}; "
            f"the tolerance of {plan.workload.precision} on {device.backend()} is {found.tolerance:.0e}"
        ),
    )


def _pairs(rows: list[tuple[str, str]]) -> Table:
    """Names and what they stand for. As text: rich reads brackets as markup."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in rows:
        table.add_row(Text(name, "bold"), Text(value))
    return table
