"""Reports of train and verify, as rich renderables: the plan, the summary of a run, a comparison."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megaloom.dsl.facts.parameters import parameters_text
from megaloom.planner.contract.planned_model import planned_model
from megaloom.planner.contract.plans import Plan, speed_of
from megaloom.planner.cost.measured_memory import held_bytes
from megaloom.planner.report.folded_table import text_table
from megaloom.planner.report.tables import layout_table, prediction_table
from megaloom.planner.report.units import memory_unit, peak_memory
from megaloom.runtime.data.synthetic import NOTE
from megaloom.runtime.engine.results import EvaluationResult
from megaloom.runtime.megatron import device
from megaloom.runtime.metrics.display import clock, device_word, mfu_text, tflops_text
from megaloom.runtime.training.training_run import RECENT_STEPS, Summary
from megaloom.runtime.training.verify import Comparison

SHOWN_WEIGHTS = 10
"""Most weights with different gradients that a report names."""


def plan_report(plan: Plan) -> RenderableType:
    """Return the layout of a plan, its predictions and its reasons."""
    model = planned_model(plan)
    return Group(
        Text(f"{model.name}: {parameters_text(model)} on {plan.cluster}\n"),
        layout_table(plan),
        Text(),
        prediction_table(plan),
        Text("\nWhy", "bold"),
        *(Padding(Text(reason), (0, 0, 0, 2)) for reason in plan.reasons),
        Text(),
    )


def summary_report(summary: Summary, plan: Plan) -> RenderableType:
    """Return the results of a run, with the predictions of its plan."""
    steps = f"{summary.step:,}" + (f" (resumed from {summary.resumed:,})" if summary.resumed else "")
    rows = [("steps", steps)]
    if summary.synthetic:
        rows.append(("data", NOTE.removeprefix("data: ")))
    if summary.skipped:
        rows.append(("skipped steps", f"{summary.skipped:,} (loss or gradients were not finite; no weight changed)"))
    if summary.step_seconds and summary.train_loss is not None:
        predicted, speed, each = plan.predicted, speed_of(plan, summary.step_seconds), device_word(plan)
        rows += [
            ("tokens", f"{summary.tokens:,} in {clock(summary.seconds)}"),
            ("step time", f"{summary.step_seconds:.3f} s (predicted {predicted.step_seconds:.3f} s)"),
            (
                f"tokens/s/{each}",
                f"{speed.tokens_per_second:,.0f} (predicted {predicted.tokens_per_second_per_device:,.0f})",
            ),
            (
                f"TFLOP/s/{each}",
                f"{tflops_text(speed.flops_per_second)} "
                f"(predicted {tflops_text(predicted.flops_per_second_per_device)})",
            ),
            ("MFU", f"{mfu_text(speed.mfu)} (predicted {predicted.mfu:.1%})"),
        ]
        rows += _training_loss(summary, summary.train_loss)
    for name, result in (("held-out", summary.held_out), ("test", summary.test)):
        if result:
            rows += _evaluated_loss(name, result, summary)
    if summary.unigram_entropy is not None:
        word = summary.unit.removeprefix("nats per ")
        text = f"{summary.unigram_entropy:.3f} {summary.unit} (held-out loss from {word} frequencies alone)"
        rows.append(("unigram entropy", text))
    rows += [
        ("peak memory", _peak_memory(summary, plan)),
        ("checkpoint", str(summary.checkpoint)),
    ]
    return Group(Text(), _pairs(rows), *_stage_report(summary, plan))


def _stage_report(summary: Summary, plan: Plan) -> list[RenderableType]:
    """Return the table of stages: seconds of one micro-batch and memory of the fullest rank, beside the predicted."""
    if not summary.stage_times:
        return []
    size, kind = memory_unit(plan), _memory_kind()
    per_pipeline_rank = plan.layout.world // plan.layout.pp  # pp is the outermost axis of the device mesh
    rows = []
    for measured, stage in zip(summary.stage_times, plan.stages, strict=True):
        own = summary.peak_nbytes[stage.rank * per_pipeline_rank :][:per_pipeline_rank]
        memory = f"{size.of(max(own))} ({size.of(held_bytes(plan.predicted.nbytes[stage.rank], kind))})"
        rows.append(
            [
                str(measured.stage),
                str(stage.rank),
                f"{1e3 * measured.forward_seconds:.2f} ({1e3 * stage.forward_seconds:.2f})",
                f"{1e3 * measured.backward_seconds:.2f} ({1e3 * stage.backward_seconds:.2f})",
                "" if stage.chunk else memory,
            ]
        )
    head = ["stage", "rank", "forward ms (predicted)", "backward ms (predicted)", f"memory {size.name} (predicted)"]
    return [
        Text("\nOne micro-batch through each stage, and memory of each pipeline rank", "bold"),
        text_table(head, rows),
    ]


def _training_loss(summary: Summary, loss: float) -> list[tuple[str, str]]:
    """Return the rows of the training loss, of its terms, and of the report of the steps."""
    whole = summary.held_out is None or summary.held_out.cross_entropy in (None, summary.held_out.loss)
    unit = f" {summary.unit}" if whole and summary.unit else ""
    count = min(RECENT_STEPS, summary.step - (summary.resumed or 0))
    rows = [("training loss", f"{loss:.3f}{unit} (mean of the last {count} steps)")]
    rows += [(f"  {name}", f"{value:.3f}") for name, value in summary.train_terms.items()]
    return rows + [(f"  {name}", f"{value:.4g}") for name, value in summary.train_report.items()]


def _evaluated_loss(name: str, result: EvaluationResult, summary: Summary) -> list[tuple[str, str]]:
    """Return the rows of a loss on held-out data, of its terms, the report of the step, perplexity and scores."""
    count = f"over {result.tokens:,} {name} {summary.counted}"
    if result.cross_entropy is None:
        rows = [(f"{name} loss", " ".join(filter(None, (f"{result.loss:.3f}", summary.unit, count))))]
    elif result.loss != result.cross_entropy:
        rows = [(f"{name} loss", f"{result.loss:.3f} {count}")]
    else:
        rows = [(f"{name} loss", f"{result.loss:.3f} {summary.unit}, {result.loss / math.log(2):.3f} bits")]
    rows += [(f"  {term}", f"{value:.3f}") for term, value in result.terms.items()]
    rows += [(f"  {term}", f"{value:.4g}") for term, value in result.report.items()]
    if result.perplexity is not None:
        rows.append((f"{'' if name == 'held-out' else name + ' '}perplexity", f"{result.perplexity:.3f} {count}"))
    if result.scores is not None:
        rows.append((f"{name} accuracy", f"{result.scores.accuracy:.4f}, macro F1 {result.scores.macro_f1:.4f}"))
    return rows


def _peak_memory(summary: Summary, plan: Plan) -> str:
    size = memory_unit(plan)
    kind, what = _memory_kind(), "" if device.gpu_count() else ", for the whole process with its libraries"
    return f"{size.of(max(summary.peak_nbytes))} {size.name} (predicted {size.of(peak_memory(plan, kind))}){what}"


def _memory_kind() -> str:
    """Return what `Engine.peak_memory` counts, by the names of `held_bytes`."""
    return "allocated" if device.gpu_count() else "device"


def comparison_report(comparison: Comparison, plan: Plan) -> RenderableType:
    """Return losses and gradient norms of both runs, their differences, and the verdict."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("step", "loss (plan)", "(1 process)", "difference", "grad norm (plan)", "(1 process)", "difference"):
        table.add_column(name, justify="right")
    rows = zip(
        comparison.planned.losses,
        comparison.reference.losses,
        comparison.planned.grad_norms,
        comparison.reference.grad_norms,
        strict=True,
    )
    for step, (a, b, c, d) in enumerate(rows, 1):
        table.add_row(str(step), f"{a:.6f}", f"{b:.6f}", f"{a - b:+.1e}", f"{c:.6f}", f"{d:.6f}", f"{c - d:+.1e}")
    return Group(
        Text(f"{plan.model} under {plan.layout}, compared with a single process\n"),
        table,
        *([_differing_gradients(comparison)] if comparison.differing else []),
        *([Text(_zeroed(comparison.without_dropout))] if comparison.without_dropout else []),
        Text(
            f"\n{'passed' if comparison.agrees else 'FAILED'}: losses differ by at most {comparison.loss_error:.1e}, "
            f"gradient norms by {comparison.norm_error:.1e}, the gradients of {len(comparison.gradients)} weights by "
            f"{comparison.gradient_error:.1e} of their largest element; "
            f"the tolerance for {plan.workload.precision} over {device.backend()} is {comparison.tolerance:.0e}"
            f"{_larger_tolerance(comparison)}"
        ),
    )


def _larger_tolerance(comparison: Comparison) -> str:
    """Return the tolerance of gradient norms and why it is larger than that of losses; empty if it is not."""
    if comparison.curve_tolerance <= comparison.tolerance:
        return ""
    return (
        f", and {comparison.curve_tolerance:.0e} for gradient norms and later losses: "
        f"in a single process the norm changes by {comparison.norm_noise:.0e} if weights are rounded"
    )


def _zeroed(nodes: tuple[str, ...]) -> str:
    """Return which dropout both runs had set to 0."""
    more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
    return f"\ndropout of fused attention was set to 0 in both runs ({nodes[0]}{more}): its masks depend on the layout"


def _differing_gradients(comparison: Comparison) -> RenderableType:
    """Return the weights whose gradients differ, largest difference first, and the layer to look at first."""
    rows = sorted(comparison.differing, key=lambda d: -d.relative)
    shown = [(d.weight, f"{d.relative:.1e}  in {d.layer}") for d in rows[:SHOWN_WEIGHTS]]
    more = len(rows) - len(shown)
    return Group(
        Text(f"\ngradients of step 1 that differ ({len(rows)} of {len(comparison.gradients)} weights):"),
        _pairs([*shown, *([("…", f"{more} more")] if more else [])]),
        Text(
            f"the last layer of the model among them is {comparison.differing[-1].layer}; "
            "the backward pass runs from the last layer to the first, so look there first"
        ),
    )


def _pairs(rows: list[tuple[str, str]]) -> Table:
    """Return a table of names and values. They are Text, because rich reads brackets in a str as markup."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in rows:
        table.add_row(Text(name, "bold"), Text(value))
    return table
