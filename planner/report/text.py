"""A plan, said so that one can judge it: what it is, why it wins, and why its neighbours lose.

Protocol: `summary` of a plan and `report` of a search are rich renderables; `dsl.show.printing` prints them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby, pairwise
from math import floor, log10
from typing import TYPE_CHECKING

from attrs import frozen
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megaloom.dsl.graph import Graph, Node
from megaloom.planner.contract.choices import MICROBATCH_OVERLAPS
from megaloom.planner.contract.devices import GiB
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan, Prediction
from megaloom.planner.search import step_difference
from megaloom.planner.search.step_difference import difference_text

if TYPE_CHECKING:
    from megaloom.planner.search.search import Found

BAR = 24  # characters of a full bar
ROWS = 16  # more pipeline ranks than this are shown in part


def report(found: Found, graph: Graph, top: int) -> RenderableType:
    """The best plan in full, beside it the next `top` - 1, and the nearest that cannot be."""
    parts = [summary(found.best, graph)]
    if others := found.next(top - 1):
        parts += [Text("\nNext best", "bold"), runners_up(found.best, others)]
    if found.rejected:
        parts += [Text("\nNearest layouts that do not work", "bold"), rejected(found)]
    return Group(*parts)


def summary(plan: Plan, graph: Graph) -> RenderableType:
    """One plan: its layout, its predictions, its reasons, where its step goes, and its pipeline ranks."""
    return Group(
        layout_table(plan),
        Text(),
        prediction_table(plan),
        Text("\nWhy", "bold"),
        listed(plan.reasons),
        Text(
            "\nWhere the step goes" + (", on the pipeline rank that waits least" if plan.layout.pp > 1 else ""), "bold"
        ),
        breakdown(plan),
        Text("\nPipeline ranks: milliseconds of one micro-batch, parameters on one device", "bold"),
        ranks(plan, graph),
        Text(f"\nMemory of each pipeline rank at its fullest, in {unit(plan).name}", "bold"),
        memory(plan),
    )


def listed(sentences: Iterable[str]) -> Table:
    """Sentences one below the other, each behind a dash."""
    table = Table.grid(padding=(0, 1))
    for sentence in sentences:
        table.add_row("-", Text(sentence))
    return table


def layout_table(*plans: Plan, names: Sequence[str] = ()) -> Table:
    """What is trained and how it is laid out, in the columns that people know; a row for each plan."""
    return _rows([_layout(plan) for plan in plans], names)


def prediction_table(*plans: Plan, names: Sequence[str] = ()) -> Table:
    """What a step of it is predicted to take; a row for each plan, in the units of the first."""
    return _rows([_predicted(plan, unit(plans[0]), clock(plans[0])) for plan in plans], names, gap=2)


def _rows(rows: Sequence[dict[str, str]], names: Sequence[str], gap: int = 1) -> Table:
    """A row for each plan, after its name if it has one."""
    named = [[name, *row.values()] for name, row in zip(names, rows, strict=True)] if names else None
    head = [*rows[0]]
    return table(["", *head] if named else head, named or [list(row.values()) for row in rows], left=("",), gap=gap)


def _layout(plan: Plan) -> dict[str, str]:
    x, w = plan.layout, plan.workload
    return {
        "GPUs": str(plan.cluster),
        "precision": w.precision.value,
        "GBS": str(w.batch),
        "MBS": str(x.micro_batch),
        "seq": str(w.seq),
        "TP": str(x.tp),
        "PP": str(x.pp),
        "VP": str(x.vpp) if not x.microbatch_group else f"{x.vpp}, groups of {x.microbatch_group}",
        "CP": str(x.cp),
        "EP": str(x.ep) if x.etp == 1 else f"{x.ep} x ETP {x.etp}",
        "DP": str(x.dp),
        "SP": _switch(x.sequence_parallel),
        "recompute": x.recompute_text,
        "dist-opt": _switch(x.distributed_optimizer),
        "overlap": overlapped(x),
    }


def overlapped(x: Layout) -> str:
    """What is exchanged while devices compute, of what there is to exchange."""
    several = x.dp * x.cp > 1
    return ", ".join(o for o in x.overlaps if several or o in MICROBATCH_OVERLAPS) or "none"


def _predicted(plan: Plan, size: Unit, time: Unit) -> dict[str, str]:
    p = plan.predicted
    return {
        f"{time.name}/step": f"{time.of(p.step_seconds)} ({_about(p.interval, time)})",
        "tok/s/GPU": f"{p.tokens_per_second_per_device:,.0f}",
        "TFLOP/s/GPU": _tera(p.flops_per_second_per_device),
        "MFU": f"{p.mfu:.1%}",
        "memory": f"{size.of(fullest(plan))} of {size.of(plan.cluster.device.nbytes)} {size.name}",
        "bubble": f"{p.bubble:.1%}",
        "exposed comm": f"{exposed(p):.1%}",
    }


def _about(ends: tuple[float, float], time: Unit) -> str:
    """From one end to the other, with two digits or more."""
    figures = [end / time.size for end in ends]
    return "-".join(f"{x:.{max(0, 1 - floor(log10(x)))}f}" for x in figures)


def ranks(plan: Plan, graph: Graph) -> Table:
    """Each pipeline rank: how long a micro-batch takes on it, and what it holds, chunk after chunk."""
    rows = []
    for rank in range(plan.layout.pp):
        chunks = [s for s in plan.stages if s.rank == rank]
        rows.append(
            [
                str(rank),
                f"{1e3 * sum(s.forward_seconds for s in chunks):.2f}",
                f"{1e3 * sum(s.backward_seconds for s in chunks):.2f}",
                si(sum(s.params for s in chunks)),
                _once("block", "; ".join(holds(graph.nodes[s.start : s.stop], graph) for s in chunks)),
            ]
        )
    return table(["rank", "forward", "backward", "params", "holds"], _part(rows), left=("holds",))


def memory(plan: Plan) -> Table:
    """Each pipeline rank's memory by what holds it."""
    size = unit(plan)
    holders = list(dict.fromkeys(holder for rank in plan.predicted.nbytes for holder in rank))
    rows = [
        [str(rank), *size.parts(nbytes.get(holder, 0) for holder in holders), size.of(sum(nbytes.values())), moment]
        for rank, (nbytes, moment) in enumerate(zip(plan.predicted.nbytes, plan.predicted.moments, strict=True))
    ]
    return table(["rank", *holders, "in all", "at the"], _part(rows), left=("at the",), gap=1)


def breakdown(plan: Plan) -> Table:
    """The seconds of a step by cause. The last row is their sum, the predicted step."""
    parts, time = plan.predicted.breakdown, clock(plan)
    step = sum(parts.values())
    shares = Unit("%", step / 100, 1).parts(parts.values())
    shown = zip(parts.items(), time.parts(parts.values()), shares, strict=True)
    rows = [[cause, figure, f"{share}%", "#" * round(BAR * s / step)] for (cause, s), figure, share in shown]
    return table(["", time.name, "share", " "], [*rows, ["a step", time.of(step), "100.0%", ""]], left=("", " "))


def runners_up(best: Plan, others: Iterable[Plan]) -> Table:
    """The next plans, each with what it loses by."""
    size, time, others = unit(best), clock(best), tuple(others)
    inner, rows = any(plan.layout.microbatch_overlap_bits for plan in (best, *others)), []
    for plan in others:
        x, p = plan.layout, plan.predicted
        rows.append(
            [
                *map(str, (x.tp, x.pp, x.vpp, x.cp, x.ep, x.dp, x.micro_batch)),
                _switch(x.sequence_parallel),
                x.recompute_text,
                _switch(x.distributed_optimizer),
                *([overlapped(x)] if inner else []),
                time.of(p.step_seconds),
                f"{p.mfu:.1%}",
                size.of(fullest(plan)),
                loses(best, plan),
            ]
        )
    head = [
        "TP",
        "PP",
        "VP",
        "CP",
        "EP",
        "DP",
        "MBS",
        "SP",
        "recompute",
        "dist-opt",
        *(["overlap"] if inner else []),
        f"{time.name}/step",
        "MFU",
        size.name,
    ]
    return table([*head, "loses by"], rows, left=("loses by",), gap=1)


def rejected(found: Found) -> Table:
    """Layouts close to the best one that cannot be had, each with its cause."""
    return table(["layout", "cause"], [[str(r.layout), r.cause] for r in found.rejected], left=("layout", "cause"))


def loses(best: Plan, plan: Plan) -> str:
    """How much slower a plan is than the best one, and by what cause."""
    return difference_text(best.predicted, plan.predicted)


def exposed(of: Prediction) -> float:
    """The share of the step in which devices wait for communication."""
    return sum(s for cause, s in of.breakdown.items() if "communication" in cause) / of.step_seconds


def fullest(plan: Plan, kind: str = "device") -> int:
    """Bytes on the fullest pipeline rank, as they are measured: see `measured_memory.held_bytes`."""
    return step_difference.peak_nbytes(plan.predicted, kind)


def holds(nodes: Sequence[Node], graph: Graph) -> str:
    """What a stage holds, in words: whole blocks by number, parts of blocks and what lies outside by kind."""
    sizes = {block: len(list(group)) for block, group in groupby(graph.nodes, key=lambda n: n.block)}
    said: list[str] = []
    whole: list[int] = []

    def flush() -> None:
        if whole:
            said.append(f"block {whole[0]}" if len(whole) == 1 else f"blocks {whole[0]}-{whole[-1]}")
            whole.clear()

    for block, group in groupby(nodes, key=lambda n: n.block):
        inside = list(group)
        if block is not None and len(inside) == sizes[block]:
            whole.append(block)
            continue
        flush()
        said.append(_kinds(inside) if block is None else f"block {block} ({_kinds(inside)})")
    flush()
    return ", ".join(said)


def _once(word: str, text: str) -> str:
    """The text with a word, or its plural, only where it comes first."""
    head, found, rest = text.partition(word)
    return head + found + rest.replace(f"{word}s ", "").replace(f"{word} ", "")


def _kinds(nodes: Sequence[Node]) -> str:
    """The kinds of these nodes: those with matrices, if there are any."""
    large = [n for n in nodes if any(len(slot.dims) > 1 for slot in n.weights)]
    return ", ".join(n.name.rpartition(".")[0] or n.name for n in large or nodes)


@frozen
class Unit:
    """A unit to show figures in."""

    name: str
    size: float
    digits: int

    def of(self, figure: float) -> str:
        """So much, in this unit."""
        return f"{figure / self.size:.{self.digits}f}"

    def parts(self, figures: Iterable[float]) -> list[str]:
        """The parts of a sum, each rounded up or down so that what is printed adds up as well."""
        sums = [0.0, *accumulate(figures)]
        return [self.of(float(self.of(b)) * self.size - float(self.of(a)) * self.size) for a, b in pairwise(sums)]


def unit(plan: Plan) -> Unit:
    """The unit that suits the memory of a plan: GiB, for small ones MiB."""
    used = fullest(plan)
    return Unit("GiB", GiB, 1 if used >= 4 * GiB else 2) if used >= GiB else Unit("MiB", 2**20, 1)


def clock(plan: Plan) -> Unit:
    """The unit that suits its step: seconds, for short ones milliseconds."""
    return Unit("s", 1.0, 3) if plan.predicted.step_seconds >= 1 else Unit("ms", 1e-3, 2)


def si(count: int) -> str:
    """A count in billions, millions or thousands, to a hundredth of them."""
    for size, name in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if count >= size:
            return f"{count / size:.2f}{name}"
    return str(count)


def _switch(on: bool) -> str:
    return "on" if on else "off"


def _tera(flops: float) -> str:
    return f"{flops / 1e12:,.0f}" if flops >= 1e13 else f"{flops / 1e12:.3g}"


def _part(rows: list[list[str]]) -> list[list[str]]:
    """All rows, or the first and last with a gap between."""
    if len(rows) <= ROWS:
        return rows
    half = ROWS // 2
    return [*rows[:half], ["..."] + [""] * (len(rows[0]) - 1), *rows[-half:]]


def table(head: Iterable[str], rows: Iterable[Sequence[str]], left: Sequence[str] = (), gap: int = 2) -> Table:
    """Columns of plain text (brackets are no markup), numbers to the right."""
    made = Table(box=None, padding=(0, gap, 0, 0), header_style="dim")
    for name in head:
        made.add_column(Text(name), justify="left" if name in left else "right", overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made
