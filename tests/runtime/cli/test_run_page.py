"""The page of a run: a curve for each figure that the run has measured, inside its chart; one file without scripts."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plan_json import save
from megaloom.planner.report.charts import BOTTOM_MARGIN, LEFT_MARGIN, PLOT_HEIGHT, PLOT_WIDTH
from megaloom.planner.report.line_chart import MAX_POINTS, Curve, line_chart
from megaloom.runtime.cli.main import main
from megaloom.runtime.metrics.metrics_file import MetricsFile

STEPS = 1000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, plan_of: Any) -> Path:
    """A run folder with made-up metrics, of which a few are not finite."""
    folder = tmp_path_factory.mktemp("runs") / "a <b> run"
    folder.mkdir()
    save(plan_of("deep_llama", Layout(dp=2)), folder / "plan.json")
    metrics = MetricsFile(folder / "metrics.jsonl", last_step=0)
    for step in range(1, STEPS + 1):
        skipped = step % 100 == 0
        speed = {"tokens_per_second_per_device": 1e4, "mfu": 0.4, "seconds": 0.5, "peak_nbytes": step << 20}
        loss = math.nan if skipped else 5 / step
        metrics.write("step", step=step, loss=loss, lr=1e-3, grad_norm=-0.5, skipped=skipped, terms={"aux": 1}, **speed)
    metrics.write("evaluation", step=STEPS, loss=0.125)
    return folder


def charts(page: str) -> dict[str, str]:
    """Return the SVG of each chart by its heading."""
    return dict(re.findall(r"<section><h2>(.*?)</h2>\n.*?(<svg.*?</svg>)</section>", page, re.DOTALL))


def points(svg: str) -> list[list[tuple[float, float]]]:
    lines = re.findall(r'<polyline points="(.*?)"', svg)
    return [[tuple(map(float, p.split(","))) for p in line.split()] for line in lines]  # type: ignore[misc]


def test_the_page_draws_each_figure(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"wrote {run / 'report.html'}\n"
    page = (run / "report.html").read_text()
    drawn = charts(page)
    assert set(drawn) == {
        "loss",
        "aux",
        "learning rate",
        "gradient norm",
        "tokens/s/process",
        "MFU, %",
        "step time, s",
        "peak memory of the fullest rank, GiB",
        "skipped steps, in all",
    }
    assert "<h1>a &lt;b&gt; run</h1>" in page and "<script" not in page and "http" not in page
    for title in ("tokens/s/process", "MFU, %", "step time, s", "peak memory of the fullest rank, GiB"):
        assert "stroke-dasharray" in drawn[title]  # the prediction
    for tile in ("<b>1,000</b><span>steps", "<b>0.1250</b><span>held-out loss", "<b>10</b><span>skipped steps"):
        assert tile in page
    assert "MFU" in page and "40.0% (predicted " in page and "1000 MiB" in page
    assert "10 at step 1000" in drawn["skipped steps, in all"]
    opened: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, _: opened.append(tag)  # type: ignore[method-assign]
    parser.handle_endtag = lambda tag: opened.remove(tag)  # type: ignore[method-assign]
    parser.feed(page)
    assert set(opened) <= {"meta", "line", "circle"}  # the tags that need no end


def test_curves_lie_inside_their_charts(run: Path) -> None:
    main(["report", str(run), "-o", str(run / "page.html")])
    for svg in charts((run / "page.html").read_text()).values():
        for curve in points(svg):
            assert 1 < len(curve) <= MAX_POINTS
            assert all(LEFT_MARGIN <= x <= PLOT_WIDTH and 0 <= y <= PLOT_HEIGHT - BOTTOM_MARGIN for x, y in curve)
            assert curve == sorted(curve, key=lambda point: point[0])


def test_a_falling_value_falls_on_the_chart() -> None:
    (curve,) = points(line_chart([Curve("loss", "red", ((1, 4.0), (2, 2.0), (3, math.inf), (4, -1.0)))], "loss"))
    heights = [y for _, y in curve]
    assert len(curve) == 3 and heights == sorted(heights)  # y grows downwards
    assert line_chart([Curve("loss", "red", ((1, math.nan),))], "loss") == ""
    assert "<circle" in line_chart([Curve("loss", "red", ((1, 0.0),))], "loss")


def test_a_run_without_steps_and_one_of_an_earlier_version(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_text((run / "plan.json").read_text())
    assert main(["report", str(tmp_path)]) == 2
    assert "metrics.jsonl has no steps yet\ntrain first: megaloom train" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "is not a run folder: it has no plan.json" in capsys.readouterr().err
    line = {"event": "step", "step": 1, "loss": None, "lr": 0.1, "grad_norm": 1.0, "seconds": 1.0}
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(line)}\n{{damaged\n")
    assert main(["report", str(tmp_path)]) == 0
    assert set(charts((tmp_path / "report.html").read_text())) == {
        "learning rate",
        "gradient norm",
        "step time, s",
        "skipped steps, in all",
    }
