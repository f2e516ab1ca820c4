"""Tables of a plan: layout, prediction, step time by cause, pipeline ranks, memory, and other layouts of a search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from math import floor, isfinite, log10
from typing import TYPE_CHECKING

from rich.table import Table

from megaloom.dsl.graph import Graph
from megaloom.dsl.node import Node
from megaloom.planner.contract.choices import MICROBATCH_OVERLAPS, GradReduce
from megaloom.planner.contract.layout import FIELDS, Layout
from megaloom.planner.contract.plans import Plan, Prediction
from megaloom.planner.search.reasons import difference_text, near, tie_text
from megaloom.planner.search.simple_first import contrast

from .folded_table import text_table
from .units import Unit, format_count, memory_unit, peak_memory, time_unit

if TYPE_CHECKING:
    from megaloom.planner.search.search import Found

BREAKDOWN_BAR = 24  # characters of a full bar
MAX_RANK_ROWS = 16  # of pipeline ranks that are shown in full


def layout_table(*plans: Plan, names: Sequence[str] = ()) -> Table:
    """Return the table of workload and layout, one row per plan, with its name in front if `names` are given."""
    formats = any(plan.layout.grad_reduce is not GradReduce.FP32 for plan in plans)
    return _plan_rows([_layout_cells(plan, formats) for plan in plans], names)


def prediction_table(*plans: Plan, names: Sequence[str] = ()) -> Table:
    """Return the table of predictions, one row per plan, in the units of the first plan."""
    return _plan_rows(
        [_prediction_cells(plan, memory_unit(plans[0]), time_unit(plans[0])) for plan in plans], names, gap=2
    )


def _plan_rows(rows: Sequence[dict[str, str]], names: Sequence[str], gap: int = 1) -> Table:
    """Return a table with these rows, each behind its name if `names` are given."""
    named = [[name, *row.values()] for name, row in zip(names, rows, strict=True)] if names else None
    head = [*rows[0]]
    return text_table(
        ["", *head] if named else head,
        named or [list(row.values()) for row in rows],
        left=("",),
        gap=gap,
        key=bool(names),
    )


def _layout_cells(plan: Plan, formats: bool) -> dict[str, str]:
    """Return the cells of a plan by column; formats: with that of gradients, which is shown where it is not fp32."""
    x, w = plan.layout, plan.workload
    return {
        "GPUs": str(plan.cluster),
        "precision": w.precision.value,
        "GBS": str(w.batch),
        "MBS": str(x.micro_batch),
        "seq": str(w.seq),
        "TP": str(x.tp),
        "PP": str(x.pp),
        "VP": str(x.vpp) if not x.microbatch_group else f"{x.vpp} (microbatch group {x.microbatch_group})",
        "CP": str(x.cp),
        "EP": str(x.ep) if x.etp == 1 else f"{x.ep} (ETP {x.etp})",
        "DP": str(x.dp),
        "SP": _on_off(x.sequence_parallel),
        "recompute": x.recompute_text,
        FIELDS["shard"].title: shard_text(x),
        **({FIELDS["grad_reduce"].title: str(x.grad_reduce)} if formats else {}),
        "overlap": active_overlaps(x),
    }


def active_overlaps(x: Layout) -> str:
    """Return the overlaps that have communication to hide, as one text; gradients need dp or cp above 1."""
    copies = x.dp * x.cp
    return ", ".join(o for o in x.overlaps if copies > 1 or o in MICROBATCH_OVERLAPS) or "none"


def _prediction_cells(plan: Plan, size: Unit, time: Unit) -> dict[str, str]:
    p = plan.predicted
    return {
        f"{time.name}/step (90% interval)": f"{time.of(p.step_seconds)} ({_interval(p.interval, time)})",
        "tok/s/GPU": f"{p.tokens_per_second_per_device:,.0f}",
        "TFLOP/s/GPU": _tflops(p.flops_per_second_per_device),
        "MFU": f"{p.mfu:.1%}",
        "memory": f"{size.of(peak_memory(plan))} of {size.of(plan.cluster.device.nbytes)} {size.name}",
        "bubble": f"{p.bubble:.1%}",
        "exposed comm": f"{exposed_communication(p):.1%}",
    }


def _interval(ends: tuple[float, float], time: Unit) -> str:
    """Return both ends of an interval with at least two digits: 6.5-9.1."""
    values = [end / time.size for end in ends]
    return "-".join(f"{x:.{max(0, 1 - floor(log10(x)))}f}" if isfinite(x) else f"{x}" for x in values)


def rank_table(plan: Plan, graph: Graph) -> Table:
    """Return the table of pipeline ranks: time of one micro-batch, parameters, and the layers of each model chunk."""
    rows = []
    for rank in range(plan.layout.pp):
        chunks = [s for s in plan.stages if s.rank == rank]
        rows.append(
            [
                str(rank),
                f"{1e3 * sum(s.forward_seconds for s in chunks):.2f}",
                f"{1e3 * sum(s.backward_seconds for s in chunks):.2f}",
                format_count(sum(s.params for s in chunks)),
                _word_once("block", "; ".join(stage_contents(graph.nodes[s.start : s.stop], graph) for s in chunks)),
            ]
        )
    return text_table(
        ["rank", "forward", "backward", "params", "layers"], _first_and_last(rows), left=("layers",), key=True
    )


def memory_table(plan: Plan) -> Table:
    """Return the table of peak memory, one row per pipeline rank: bytes by holder, their sum, and the moment."""
    size = memory_unit(plan)
    holders = list(dict.fromkeys(holder for rank in plan.predicted.nbytes for holder in rank))
    rows = [
        [str(rank), *size.parts(nbytes.get(holder, 0) for holder in holders), size.of(sum(nbytes.values())), moment]
        for rank, (nbytes, moment) in enumerate(zip(plan.predicted.nbytes, plan.predicted.moments, strict=True))
    ]
    return text_table(["rank", *holders, "total", "peak at"], _first_and_last(rows), left=("peak at",), gap=1, key=True)


def breakdown_table(plan: Plan) -> Table:
    """Return the seconds of a step by cause, with bars. The last row is their sum, the predicted step."""
    parts, time = plan.predicted.breakdown, time_unit(plan)
    step = sum(parts.values())
    shares = Unit("%", step / 100, 1).parts(parts.values())
    columns = zip(parts.items(), time.parts(parts.values()), shares, strict=True)
    rows = [[cause, value, f"{share}%", "#" * round(BREAKDOWN_BAR * s / step)] for (cause, s), value, share in columns]
    return text_table(["", time.name, "share", " "], [*rows, ["total", time.of(step), "100.0%", ""]], left=("", " "))


def next_best_table(best: Plan, others: Iterable[Plan]) -> Table:
    """Return the table of other plans, each with its difference to the best one."""
    others = tuple(others)
    with_overlap = any(plan.layout.microbatch_overlap_bits for plan in (best, *others))
    rows = [_next_best_cells(best, plan, with_overlap) for plan in others]
    return text_table(rows[0], [list(row.values()) for row in rows], left=("difference",), gap=1)


def _next_best_cells(best: Plan, plan: Plan, with_overlap: bool) -> dict[str, str]:
    size, time, x, p = memory_unit(best), time_unit(best), plan.layout, plan.predicted
    axes = {"TP": x.tp, "PP": x.pp, "VP": x.vpp, "CP": x.cp, "EP": x.ep, "DP": x.dp, "MBS": x.micro_batch}
    return {
        **{title: str(degree) for title, degree in axes.items()},
        "SP": _on_off(x.sequence_parallel),
        "recompute": x.recompute_text,
        FIELDS["shard"].title: shard_text(x),
        **({"overlap": active_overlaps(x)} if with_overlap else {}),
        f"{time.name}/step": time.of(p.step_seconds),
        "MFU": f"{p.mfu:.1%}",
        size.name: size.of(peak_memory(plan)),
        "difference": _difference(best, plan),
    }


def _difference(best: Plan, plan: Plan) -> str:
    """Return by what a plan is slower than the best one, or that the model cannot tell them apart."""
    if not near(best.predicted.step_seconds, plan.predicted.step_seconds):
        return difference_text(best.predicted, plan.predicted)
    words = contrast(plan.layout, best.layout, plan.cluster)
    return f"cannot be told apart: {tie_text(best.predicted, plan.predicted, words)}"


def rejected_table(result: Found) -> Table:
    """Return the table of layouts close to the best one that break a rule or do not fit, each with its cause."""
    rows = [[str(rejected.layout), rejected.cause] for rejected in result.rejected]
    return text_table(["layout", "cause"], rows, left=("layout", "cause"))


def exposed_communication(of: Prediction) -> float:
    """Return the share of the step in which devices wait for communication."""
    return sum(s for cause, s in of.breakdown.items() if "communication" in cause) / of.step_seconds


def stage_contents(nodes: Sequence[Node], graph: Graph) -> str:
    """Return the layers of a stage: whole blocks by number, parts of blocks and other nodes by the names of layers."""
    sizes = {block: len(list(group)) for block, group in groupby(graph.nodes, key=lambda n: n.block)}
    parts: list[str] = []
    whole: list[int] = []

    def flush() -> None:
        if whole:
            parts.append(f"block {whole[0]}" if len(whole) == 1 else f"blocks {whole[0]}-{whole[-1]}")
            whole.clear()

    for block, group in groupby(nodes, key=lambda n: n.block):
        inside = list(group)
        if block is not None and len(inside) == sizes[block]:
            whole.append(block)
            continue
        flush()
        parts.append(_layer_names(inside) if block is None else f"block {block} ({_layer_names(inside)})")
    flush()
    return ", ".join(parts)


def _word_once(word: str, text: str) -> str:
    """Return the text without repetitions of a word or its plural after the first one."""
    head, first, rest = text.partition(word)
    return head + first + rest.replace(f"{word}s ", "").replace(f"{word} ", "")


def _layer_names(nodes: Sequence[Node]) -> str:
    """Return the layer names of these nodes; of the nodes with matrices alone, if there are any."""
    large = [n for n in nodes if any(len(slot.dims) > 1 for slot in n.weights)]
    return ", ".join(n.name.rpartition(".")[0] or n.name for n in large or nodes)


def shard_text(x: Layout) -> str:
    """Return the state that is sharded over data-parallel ranks: `optimizer`, `weights (reshard step)`."""
    more = [f"experts: {x.expert_shard}"] * bool(x.expert_shard) + [f"reshard {x.reshard}"] * bool(x.reshard)
    return f"{x.shard} ({', '.join(more)})" if more else str(x.shard)


def _on_off(on: bool) -> str:
    return "on" if on else "off"


def _tflops(flops: float) -> str:
    return f"{flops / 1e12:,.0f}" if flops >= 1e13 else f"{flops / 1e12:.3g}"


def _first_and_last(rows: list[list[str]]) -> list[list[str]]:
    """Return all rows, or the first and last ones with a row of dots between, if there are more than MAX_RANK_ROWS."""
    if len(rows) <= MAX_RANK_ROWS:
        return rows
    half = MAX_RANK_ROWS // 2
    return [*rows[:half], ["..."] + [""] * (len(rows[0]) - 1), *rows[-half:]]
