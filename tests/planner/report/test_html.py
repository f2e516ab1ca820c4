"""The page of a plan: its figures add up, it loads nothing else, and a browser displays it correctly."""

import base64
import gzip
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from decimal import Decimal
from functools import cache
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from megaloom.dsl.catalog import find
from megaloom.dsl.graph import Model, graph
from megaloom.planner import cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Workload
from megaloom.planner.report.charts import axis_values, pareto_front, scatter_plot
from megaloom.planner.report.chrome_trace import replay
from megaloom.planner.report.html import TIME_STEPS, page_data, plan_page
from megaloom.planner.search.search import Found
from megaloom.planner.search.search import plan as search
from tests.support.limits import LIMIT
from tests.support.paths import SUPPORT

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PROBE = (SUPPORT / "probe.js").read_text("utf-8")


def found_for(name: str, gpus: str, seq: int, batch: int, **fixed: Any) -> tuple[Found, Model]:
    model, ref = find(name)
    return search(model, cluster(gpus), Workload(seq=seq, batch=batch), ref=ref, fixed=fixed), model


@pytest.fixture(scope="module")
def chunked() -> tuple[Found, Model]:
    """Experts, several chunks a rank, two nodes, rivals."""
    return found_for("mixtral-8x7b", "16xH100", 4096, 64, pp=2, vpp=4, ep=4, micro_batch=1)


@pytest.fixture(scope="module")
def plain() -> tuple[Found, Model]:
    """One chunk a rank, few micro-batches: every box is wide."""
    return found_for("llama3-8b", "4xH100", 4096, 8, pp=4, vpp=1, micro_batch=1)


@pytest.fixture(scope="module")
def large() -> tuple[Found, Model]:
    """64 pipeline ranks with 512 micro-batches each, 2,048 devices."""
    fixed = {"pp": 64, "tp": 8, "dp": 4, "micro_batch": 1, "vpp": 1, "cp": 1, "sequence_parallel": True}
    return found_for("gpt3-175b", "2048xH100", 2048, 2048, **fixed)


class Parsed(HTMLParser):
    """Tags that are open at the end of a page, resources that it loads, and the cells of its table rows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [f"{tag} {name}" for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        if "td" in self.open:
            self.rows[-1][-1] += text


def test_it_needs_nothing_else(chunked: tuple[Found, Model]) -> None:
    result, model = chunked
    text = plan_page(result.best, model, result)
    parsed = Parsed(text)
    assert parsed.open == [] and parsed.loads == []
    assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttpRequest|<link|<iframe|<img", text)
    assert text == plan_page(result.best, model, result)


def test_the_step_adds_up(chunked: tuple[Found, Model]) -> None:
    """The rows of the table are the breakdown, to a digit, and add up; the bar is as wide as they."""
    result, model = chunked
    text = plan_page(result.best, model, result)
    rows = {row[0]: row[1:] for row in Parsed(text).rows if row}
    parts = result.best.predicted.breakdown
    assert [float(rows[cause][0]) for cause in parts] == pytest.approx([*parts.values()], abs=1e-3)
    for column in (0, 1):
        assert sum(Decimal(rows[cause][column].rstrip("%")) for cause in parts) == Decimal(
            rows["total"][column].rstrip("%")
        )
    assert rows["total"] == [f"{result.best.predicted.step_seconds:.3f}", "100.0%"]
    bar = text.partition('<div class="bar">')[2].partition("</div>")[0]
    assert sum(map(float, re.findall(r"width: ([\d.]+)%", bar))) == pytest.approx(100, abs=0.01)


def test_the_bars_are_the_memory(chunked: tuple[Found, Model]) -> None:
    result, model = chunked
    text = plan_page(result.best, model)
    bars = re.findall(r"<i>rank (\d+)</i><div>(.*?)</div><b>([\d.]+)</b>", text)
    whole = result.best.cluster.device.nbytes
    for (rank, bar, label), nbytes in zip(bars, result.best.predicted.nbytes, strict=True):
        assert label == f"{sum(nbytes.values()) / 2**30:.1f}", rank
        filled = sum(map(float, re.findall(r"width: ([\d.]+)%", bar)))
        assert filled == pytest.approx(100 * sum(nbytes.values()) / whole, abs=0.01)


def test_the_scripts_read_the_timeline(chunked: tuple[Found, Model]) -> None:
    """The data of the scripts has every step in order, with the start and end of the simulation."""
    result, model = chunked
    priced = replay(result.best, graph(model))
    data = page_data(result.best, graph(model), priced)
    assert data["unit"] * TIME_STEPS == pytest.approx(result.best.predicted.step_seconds)
    pp, stages = data["pp"], len(result.best.stages)
    numbers = np.frombuffer(gzip.decompress(base64.b64decode(data["events"])), "<i4").reshape(3, pp, -1)
    for rank, events in enumerate(priced.timeline.events):
        now = 0
        for leg, microbatch, wait, (step, start, end) in zip(*numbers[:, rank], events, strict=True):
            now += int(wait)
            assert now * data["unit"] == pytest.approx(start, abs=data["unit"])
            now += data["durations"][leg]
            assert now * data["unit"] == pytest.approx(end, abs=2 * data["unit"])
            assert (step.stage, step.backward) == ((2 * stages - 1 - leg, True) if leg >= stages else (leg, False))
            assert step.microbatch == microbatch


def test_a_large_world_is_a_small_file(large: tuple[Found, Model]) -> None:
    result, model = large
    assert result.best.layout.microbatches(2048) == 512
    assert len(plan_page(result.best, model, result).encode()) < 3e5


def test_what_is_written_is_escaped(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of("deep_llama", Layout(pp=2))
    model = evolve(find(plan.model)[0], name='<b>&"</script>')
    text = plan_page(evolve(plan, reasons=("a <b> & c",)), model)
    assert text.count("</script>") == text.count("<script")
    assert "<b>&" not in text and "&lt;b&gt;&amp;" in text and "a &lt;b&gt; &amp; c" in text


@given(st.lists(st.tuples(st.floats(1, 9), st.integers(1, 9)), min_size=1, max_size=12))
def test_no_plan_is_better_in_both_than_one_on_the_line(pairs: list[tuple[float, int]]) -> None:
    plans = [sized(seconds, nbytes) for seconds, nbytes in pairs]
    line = pareto_front(plans)
    better = [
        (a, b)
        for a in plans
        for b in line
        if a.predicted.step_seconds <= b.predicted.step_seconds and total(a) <= total(b) and measures(a) != measures(b)
    ]
    assert better == []
    assert all(any(measures(b)[0] <= measures(a)[0] and measures(b)[1] <= measures(a)[1] for b in line) for a in plans)


@cache
def base() -> Plan:
    return found_for("gpt2", "1xH100", 1024, 8)[0].best


def sized(seconds: float, nbytes: int) -> Plan:
    """A plan that takes so much time and memory."""
    prediction = evolve(base().predicted, step_seconds=seconds, nbytes=({"weights": nbytes << 30},))
    return evolve(base(), predicted=prediction)


def total(plan: Plan) -> int:
    return sum(plan.predicted.nbytes[0].values())


def measures(plan: Plan) -> tuple[float, int]:
    return plan.predicted.step_seconds, total(plan)


@given(st.lists(st.tuples(st.floats(1, 9), st.integers(1, 9)), min_size=1, max_size=12))
def test_all_plans_are_on_the_drawing(pairs: list[tuple[float, int]]) -> None:
    plans = [sized(seconds, nbytes) for seconds, nbytes in pairs]
    text = scatter_plot(plans)
    wide, high = map(float, re.findall(r'viewBox="0 0 (\d+) (\d+)"', text)[0])
    positions = re.findall(r'<circle class="plan(?: best)?" cx="([\d.]+)" cy="([\d.]+)"', text)
    assert len(positions) == len(plans)
    assert all(50 < float(x) < wide and 0 < float(y) < high - 30 for x, y in positions)
    assert text.index("plan best") > text.rindex('class="plan"') if len(plans) > 1 else True


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=9))
def test_an_axis_has_a_few_round_numbers_around_all(values: list[float]) -> None:
    ticks = axis_values(values)
    gaps = np.diff(ticks)
    assert 2 <= len(ticks) <= 9
    assert ticks[0] <= min(values) and max(values) <= ticks[-1]
    assert gaps == pytest.approx(gaps[0], rel=1e-3)


# In a browser


@pytest.fixture(scope="module")
def browser() -> str:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser to look at pages with: none of {', '.join(BROWSERS)} is installed")
    return path


@pytest.fixture
def look(browser: str, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return the answer of a script in a browser; write a picture into the folder $PAGES if it is set."""

    def run(text: str, *points: tuple[int, float], width: int = 1280, dark: bool = False, name: str = "") -> Any:
        inside = text.replace("<head>", f"<head><script>{PROBE}</script>", 1)
        probed = tmp_path / "probed.html"
        probed.write_text(inside.replace("</body>", f"<script>probe({json.dumps(points)})</script></body>"), "utf-8")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={width},2400"]
        flags += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000"]
        flags += ["--blink-settings=preferredColorScheme=0"] if dark else []
        if name and (folder := os.environ.get("PAGES")):
            shown = tmp_path / "shown.html"
            shown.write_text(text, "utf-8")
            picture = f"--screenshot={Path(folder) / name}.png"
            subprocess.run([browser, *flags, picture, shown.as_uri()], capture_output=True, timeout=LIMIT, check=True)
        done = subprocess.run(
            [browser, *flags, "--dump-dom", probed.as_uri()], capture_output=True, text=True, timeout=LIMIT, check=True
        )
        answer = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.S)
        assert answer, done.stdout[-2000:] + done.stderr[-2000:]
        return json.loads(unescape(answer[1]))

    return run


def legible(seen: dict[str, Any], plan: Plan) -> None:
    """Nothing failed; no text lies on another, or outside of what it is on; nothing has to be moved sideways."""
    assert seen["errors"] == []
    assert seen["overlaps"] == [] and seen["cut"] == [] and seen["sideways"] <= 0
    assert min(seen["contrast"]) >= 4.5  # WCAG 2.2, 1.4.3
    assert [canvas["id"] for canvas in seen["canvases"]] == ["timeline", "memory", "map"]
    for canvas in seen["canvases"]:
        assert (canvas["overlaps"], canvas["outside"], canvas["blank"]) == ([], [], False), canvas["id"]
    timeline, memory, devices = seen["canvases"]
    priced = replay(plan, graph(find(plan.model)[0]))
    assert int(timeline["drawn"]) == sum(map(len, priced.timeline.events))
    assert float(timeline["ends"]) == pytest.approx(priced.timeline.makespan, rel=1e-6)
    assert float(memory["peak"]) == max(sum(nbytes.values()) for nbytes in plan.predicted.nbytes)
    assert int(devices["drawn"]) == plan.layout.world


@pytest.mark.parametrize("width", [1280, 520])
def test_it_is_legible(width: int, look: Callable[..., dict[str, Any]], chunked: tuple[Found, Model]) -> None:
    result, model = chunked
    seen = look(plan_page(result.best, model, result), width=width, name=f"chunked-{width}")
    legible(seen, result.best)
    assert seen["paper"] > 0.9
    assert seen["whole"] and seen["halved"] == pytest.approx(0.5)


def test_it_is_legible_in_the_dark(look: Callable[..., dict[str, Any]], plain: tuple[Found, Model]) -> None:
    result, model = plain
    seen = look(plan_page(result.best, model, result), dark=True, name="plain-dark")
    legible(seen, result.best)
    assert seen["paper"] < 0.02


def test_it_is_legible_when_it_is_large(look: Callable[..., dict[str, Any]], large: tuple[Found, Model]) -> None:
    result, model = large
    legible(look(plan_page(result.best, model, result), name="large"), result.best)


def test_the_picture_is_the_timeline(look: Callable[..., dict[str, Any]], plain: tuple[Found, Model]) -> None:
    """The middle of each step has its colour and tooltip; so has the middle of each wait."""
    result, model = plain
    line = replay(result.best, graph(model)).timeline
    steps = [(rank, event) for rank, events in enumerate(line.events) for event in events]
    points = [(rank, event.start + 0.3 * (event.end - event.start)) for rank, event in steps]
    seen = look(plan_page(result.best, model, result), *points, (3, line.events[3][0].start / 2))
    *during, waits = seen["seen"]
    for (rank, (step, start, end)), (kind, label) in zip(steps, during, strict=True):
        direction = "backward" if step.backward else "forward"
        assert kind == direction
        assert label.startswith(f"rank {rank}: {direction} of micro-batch {step.microbatch}\n")
        assert f"{1e3 * (end - start):.2f} ms, from " in label
    assert waits[0] == "wait" and waits[1].startswith("rank 3: waits")
    parts = r"[\d.]+ GiB for the whole step, [\d.]+ GiB activations and transient memory"
    assert re.match(rf"rank 0 at .*: [\d.]+ GiB\n{parts}", seen["memory"])
    assert seen["device"] == "rank 0: device 0 of node 0\npp 0\npp group: 0, 1, 2, 3"
    assert seen["pressed"] == ["pp"]
