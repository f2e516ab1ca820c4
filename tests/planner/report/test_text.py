"""The text of a search: tables, reasons, and the causes why other layouts are slower."""

from __future__ import annotations

import re
from decimal import Decimal
from io import StringIO
from itertools import accumulate, pairwise

from attrs import evolve
from hypothesis import assume, given
from hypothesis import example as always
from hypothesis import strategies as st
from rich.console import Console

from megaloom.dsl.catalog import find
from megaloom.dsl.files.json_form import fingerprint
from megaloom.dsl.graph import graph
from megaloom.dsl.show.printing import show
from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import PLAN_VERSION, Plan, Prediction, Stage
from megaloom.planner.contract.workload import Workload
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.report.tables import stage_contents
from megaloom.planner.report.text import search_report
from megaloom.planner.report.units import Unit
from megaloom.planner.search.reasons import difference_text
from megaloom.planner.search.search import Found, Rejected


def make_plan(layout: Layout, bounds: tuple[int, ...], breakdown: dict[str, float]) -> Plan:
    """A plan of gpt2 on 8xH100 with round figures."""
    model, ref = find("gpt2")
    step = sum(breakdown.values())
    return Plan(
        version=PLAN_VERSION,
        model=ref,
        fingerprint=fingerprint(model),
        cluster=cluster("8xH100"),
        workload=Workload(seq=1024, batch=64),
        layout=layout,
        stages=tuple(
            Stage(
                rank=i % layout.pp,
                chunk=i // layout.pp,
                start=start,
                stop=stop,
                forward_seconds=0.001 * (i + 1),
                backward_seconds=0.002 * (i + 1),
                params=31_000_000,
            )
            for i, (start, stop) in enumerate(pairwise(bounds))
        ),
        predicted=Prediction(
            step_seconds=step,
            interval=(0.9 * step, 1.3 * step),
            tokens_per_second_per_device=8192 / step,
            flops_per_second_per_device=1.25e14,
            mfu=0.125,
            bubble=0.1,
            breakdown=breakdown,
            nbytes=tuple({"weights": (1 + r) << 30, "activations": (9 - r) << 29} for r in range(layout.pp)),
            moments=("start of the first backward pass (micro-batch 0)",) * layout.pp,
        ),
        reasons=("A first reason [with brackets].", "A second."),
    )


def example() -> Found:
    half = len(graph(find("gpt2")[0]).nodes) // 2
    cuts = graph(find("gpt2")[0]).cut_points
    four = (0, cuts[5], cuts[12], cuts[18], 2 * half + 1)
    fast = make_plan(
        Layout(dp=4, pp=2, vpp=2, micro_batch=2), four, {"forward": 0.75, "backward": 1.5, "pipeline bubble": 0.25}
    )
    more = {"forward": 0.75, "backward": 1.5, "tensor-parallel communication": 0.375}
    slow = make_plan(Layout(dp=4, tp=2, sequence_parallel=True, recompute=Recompute.FULL), (0, 2 * half + 1), more)
    return Found(
        best=fast,
        fastest=fast,
        recommended=fast,
        others=(slow,),
        variants=(),
        rejected=(Rejected(Layout(dp=8, micro_batch=8), "81.2 GiB on rank 0, of 79.1"),),
        slower=(),
        seconds=0.1,
    )


GOLDEN = """\
  GPUs precision GBS MBS  seq TP PP VP CP EP DP  SP recompute shard   overlap
8xH100      bf16  64   2 1024  1  2  2  1  1  4 off      none  none gradients

s/step (90% interval)  tok/s/GPU  TFLOP/s/GPU    MFU           memory  bubble  exposed comm
      2.500 (2.2-3.2)      3,277          125  12.5%  6.0 of 79.1 GiB   10.0%          0.0%

Why
- A first reason [with brackets].
- A second.

Time of one step, on the slowest pipeline rank
                     s   share
forward          0.750   30.0%  #######
backward         1.500   60.0%  ##############
pipeline bubble  0.250   10.0%  ##
total            2.500  100.0%

Pipeline ranks: milliseconds per micro-batch, parameters per device
rank  forward  backward   params  layers
   0     4.00      8.00  62.00 M  embed, positions, blocks 0-1; 5 (mlp), 6-7, 8 (attention)
   1     6.00     12.00  62.00 M  blocks 2-4, 5 (attention); 8 (mlp), 9-11, unembed

Peak memory of each pipeline rank, in GiB
rank weights activations total peak at
   0     1.0         4.5   5.5 start of the first backward pass (micro-batch 0)
   1     2.0         4.0   6.0 start of the first backward pass (micro-batch 0)

Next best layouts
TP PP VP CP EP DP MBS SP recompute shard s/step   MFU GiB difference
 2  1  1  1  1  4   1 on      full  none  2.625 12.5% 5.5 5.0% slower: tensor-parallel communication +375 ms, pipeline bubble −250 ms

Similar layouts that break a rule or do not fit
layout    cause
dp8 mbs8  81.2 GiB on rank 0, of 79.1
"""  # noqa: E501 (a table's lines are as long as they are)


def test_a_report_reads_well() -> None:
    text = StringIO()
    show(search_report(example(), graph(find("gpt2")[0]), top=5), text)
    assert text.getvalue() == GOLDEN


def test_on_a_terminal_a_report_has_colours_and_fits() -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    text = Terminal()
    show(search_report(example(), graph(find("gpt2")[0]), top=5), text)
    assert "\x1b[" in text.getvalue()
    assert "A first reason [with brackets]." in text.getvalue()
    assert "…" not in text.getvalue()


def test_what_a_stage_holds_is_said_by_blocks() -> None:
    g = graph(find("gpt2")[0])
    assert stage_contents(g.nodes, g) == "embed, positions, blocks 0-11, unembed"
    text = [stage_contents(g.nodes[a:b], g) for a, b in pairwise((0, *g.cut_points, len(g.nodes)))]
    assert text[:4] == ["embed", "positions", "block 0 (attention)", "block 0 (mlp)"]
    assert text[-2:] == ["layer_norm", "unembed"]


def test_a_loser_names_the_cause_that_adds_most() -> None:
    result = example()
    assert (
        difference_text(result.best.predicted, result.others[0].predicted)
        == "5.0% slower: tensor-parallel communication +375 ms, pipeline bubble −250 ms"
    )
    assert (
        difference_text(result.best.predicted, result.best.predicted)
        == "equally fast, and no simpler than the best plan"
    )
    predicted = result.best.predicted
    fuller = [{**nbytes, "weights": nbytes["weights"] + (3 << 29)} for nbytes in predicted.nbytes]
    other = evolve(result.best, predicted=evolve(predicted, nbytes=tuple(fuller)))
    assert difference_text(result.best.predicted, other.predicted) == "equally fast, with 1.5 GiB more memory"


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=12))
def test_what_is_printed_of_a_sum_adds_up(figures: list[float]) -> None:
    size = Unit("s", 1.0, 3)
    shown = [Decimal(part) for part in size.parts(figures)]
    assert sum(shown) == Decimal(size.of([*accumulate(figures)][-1]))
    assert all(abs(float(part) - figure) <= 0.001001 for part, figure in zip(shown, figures, strict=True))


PREDICTED = Prediction(
    step_seconds=1.0,
    interval=(0.9, 1.3),
    tokens_per_second_per_device=1.0,
    flops_per_second_per_device=1.0,
    mfu=0.1,
    bubble=0.0,
    breakdown={"forward": 1.0},
    nbytes=({"weights": 1},),
    moments=("start",),
)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=9))
@always([(0.0, 0.99999), (1.0, 1.0)])
def test_the_causes_of_a_difference_explain_it(seconds: list[tuple[float, float]]) -> None:
    """The named causes and "other parts" add up to at least 80 % and at most 120 % of the difference."""
    names = [f"cause {i}" for i in range(len(seconds))]
    predicted = PREDICTED
    one, two = (
        evolve(predicted, breakdown=dict(zip(names, each, strict=True)), step_seconds=sum(each))
        for each in zip(*seconds, strict=True)
    )
    slower = two.step_seconds - one.step_seconds
    assume(one.step_seconds > 0.1 and slower > 0.01 * one.step_seconds)
    text = difference_text(one, two)
    signs = {"+": 1, "−": -1}
    found = [
        signs[sign] * float(number) * (1 if unit == "s" else 1e-3)
        for sign, number, unit in re.findall(r"([+−])([\d.e]+) (s|ms)", text)
    ]
    rounding = sum(map(abs, found)) * 0.006
    assert abs(sum(found) - slower) <= 0.2 * slower + rounding, text
    assert 1 <= len(found) <= 4


def test_no_word_is_broken_at_80_columns() -> None:
    text = StringIO()
    Console(file=text, width=80, force_terminal=True, color_system=None).print(
        search_report(example(), graph(find("gpt2")[0]), top=5)
    )
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    words = {word for line in GOLDEN.splitlines() for word in line.split()}
    assert {word for line in lines for word in line.split()} - {"#"} <= words
