"""The web page of a second opinion, and what the tokens of a long run take."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megaloom.planner.cli.main import main
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.runs.opinion import Opinion, second_opinion
from megaloom.planner.runs.page import opinion_page
from megaloom.planner.runs.read import RunInputs, read_text

FLAGS = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 1 --global-batch-size 64 --bf16 --vocab-size 32000 --tokenizer-type NullTokenizer"
)
SLOW = f"torchrun --nproc_per_node 8 pretrain_gpt.py {FLAGS} --tensor-model-parallel-size 8 --save <&>"
SLOW = SLOW.replace("<&>", "'/x/<&>'")


def opinion(flags: str = "", machine: str = "8xH100") -> Opinion:
    """Return the opinion on a run with these flags more."""
    return second_opinion(read_text(f"{SLOW} {flags}", "a<b.sh", RunInputs()), cluster(machine))


class _Tags(HTMLParser):
    """Counts open elements."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "br", "img", "hr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.text += data


def read_page(text: str) -> str:
    """Return the text of a page, all of whose elements must be closed."""
    tags = _Tags()
    tags.feed(text)
    tags.close()
    assert not tags.open
    return tags.text


def test_the_page_has_the_run_beside_the_best_layout() -> None:
    given = opinion()
    assert given.best is not None
    text = read_page(opinion_page(given))
    assert "this run" in text and "fastest" in text and "a<b.sh: a second opinion" in text
    assert "What matters, and the share of the step" in text and str(given.best.layout) in text
    assert text.count("Peak memory of the device") >= 2


def test_a_run_that_breaks_a_rule_has_a_page_without_predictions() -> None:
    text = read_page(opinion_page(opinion("--context-parallel-size 3")))
    assert "Rules broken: " in text and "Prediction" not in text


def test_a_broken_rule_is_an_answer_with_its_page_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run was read, so that nothing is refused: stderr is empty. Exit code 2 is for what cannot be read."""
    (tmp_path / "run.sh").write_text(f"{SLOW} --context-parallel-size 3")
    page, read = tmp_path / "page.html", ["--from", str(tmp_path / "run.sh"), "--gpus", "H100"]
    assert main([*read, "--html", str(page)]) == 1
    shown = capsys.readouterr()
    assert "Rules broken" in shown.out and f"wrote {page}" in shown.out and not shown.err
    assert "Rules broken: " in read_page(page.read_text())
    page.unlink()
    assert main([*read, "--html", str(page), "--set", "seq-length=none"]) == 2
    assert not page.exists() and capsys.readouterr().err


def test_tokens_take_less_with_the_best_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text(SLOW)
    common = ["--from", str(tmp_path / "run.sh"), "--gpus", "H100", "--tokens", "100B", "--price", "2"]
    assert main([*common, "--within", "1d", "--html", str(tmp_path / "page.html")]) == 0
    text = capsys.readouterr().out
    assert "This run: 100B tokens" in text and "Best:     100B tokens" in text
    assert f"wrote {tmp_path / 'page.html'}" in text and read_page((tmp_path / "page.html").read_text())
    assert main([*common, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["from"]["tokens"]
    assert found["best"]["days"] < found["predicted"]["days"]
    share = found["best"]["days"] / found["predicted"]["days"]
    assert share == pytest.approx(1 - opinion().gain, rel=0.01)


def test_a_page_that_cannot_be_written_is_refused_before_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.sh").write_text(SLOW)
    page = str(tmp_path / "no" / "page.html")
    assert main(["--from", str(tmp_path / "run.sh"), "--gpus", "H100", "--html", page]) == 2
    assert "--html" in capsys.readouterr().err
