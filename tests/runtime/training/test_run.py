"""A run continues from its checkpoint under any layout, and reports its losses."""

import json
import shutil
from math import exp
from pathlib import Path

import pytest
from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import PlanError
from megaloom.runtime import Recipe, Summary, train
from megaloom.runtime.checkpoints.checkpoint_folder import CheckpointError
from megaloom.runtime.megatron import device
from megaloom.runtime.metrics.display import clock
from megaloom.runtime.metrics.metrics_file import MetricsFile
from megaloom.runtime.training.evaluation import evaluate_run
from megaloom.runtime.training.host_memory import check_host_memory
from megaloom.runtime.training.run_folder import locked
from megaloom.runtime.training.verify import compare
from tests.support.checkpoints import damage
from tests.support.limits import LIMIT

RECIPE = Recipe(steps=6, lr=1e-2, warmup=2)


def curve(folder: Path) -> list[float]:
    """The loss of each step, from the metrics file."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    return [line["loss"] for line in steps]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Some text to train on: this folder's."""
    folder = tmp_path_factory.mktemp("text")
    for path in Path(__file__).parent.glob("test_*.py"):
        shutil.copy(path, folder)
    return str(folder)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, text: str, plan_of) -> tuple[Path, Summary]:
    """A run of six steps that saved every third, over two data-parallel processes."""
    folder = tmp_path_factory.mktemp("run")
    every = {"save_every": 3, "evaluate_every": 4, "evaluate_all": True}
    return folder, train(plan_of("byte_llama", Layout(dp=2)), RECIPE, folder=folder, source=text, **every)


def test_a_run_tells_what_it_came_to(finished: tuple[Path, Summary]) -> None:
    folder, done = finished
    losses = curve(folder)
    assert (done.step, done.resumed, done.stopped) == (6, None, False)
    assert done.tokens == 6 * 4 * 32
    assert done.train_loss == pytest.approx(sum(losses) / 6)
    assert done.held_out is not None
    held_out = (folder / "data" / "held_out.bin").stat().st_size
    assert done.held_out.tokens == (held_out - 1) // 32 * 32
    assert losses[-1] < losses[0] - 0.5  # it learns
    assert done.held_out.loss < losses[0]
    assert 2.5 < done.unigram_entropy < 4
    assert len(done.peak_nbytes) == 2
    assert min(done.peak_nbytes) > 100e6
    assert done.checkpoint == folder / "step-000006"
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-000003", "step-000006"]
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = events[-1]
    assert (last["loss"], last["tokens"]) == (done.held_out.loss, done.held_out.tokens)
    assert last["perplexity"] == pytest.approx(exp(done.held_out.loss))
    assert [(e["event"], e["step"]) for e in events if e["event"] != "step"] == [
        ("checkpoint", 3),
        ("evaluation", 4),
        ("checkpoint", 6),
        ("evaluation", 6),
    ]


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(tp=2)], ids=str)
def test_resumed_under_another_layout_it_computes_the_same(
    layout: Layout, finished: tuple[Path, Summary], text: str, plan_of, tmp_path: Path, capfd
) -> None:
    folder = shutil.copytree(finished[0], tmp_path / "run")
    shutil.rmtree(folder / "step-000006")
    done = train(plan_of("byte_llama", layout), RECIPE, folder=folder, source=text, evaluate_all=True)
    assert done.resumed == 3
    assert curve(folder) == pytest.approx(curve(finished[0]), abs=1e-5)
    assert done.held_out.loss == pytest.approx(finished[1].held_out.loss, abs=1e-5)
    assert done.held_out.tokens == finished[1].held_out.tokens
    output = capfd.readouterr().out
    assert f"resumed from step 3 of 6 ({folder}/step-000003)" in output
    assert ("layout: saved under dp2" in output) == (layout.dp == 1)
    assert "data: " not in output


def test_a_resumed_run_says_what_changed_of_its_workload(
    finished: tuple[Path, Summary], text: str, plan_of, tmp_path: Path, capfd
) -> None:
    folder = shutil.copytree(finished[0], tmp_path / "run")
    plan = plan_of("byte_llama", Layout(), seq=16, batch=2, precision="bf16")
    train(plan, evolve(RECIPE, steps=7), folder=folder, source=text, evaluate_batches=1)
    output = capfd.readouterr().out
    assert "seq: was 32, is now 16: the order of the text starts anew" in output
    assert "batch: was 4, is now 2\n" in output
    assert "precision: was fp32, is now bf16\n" in output


def test_a_checkpoint_with_damaged_contents_is_refused_and_the_run_stays_as_it_was(
    finished: tuple[Path, Summary], text: str, plan_of, tmp_path: Path
) -> None:
    """The checksums fit, so that only reading the tensors finds it."""
    folder = shutil.copytree(finished[0], tmp_path / "run")
    damage(folder / "step-000006")
    before = {name: (folder / name).read_bytes() for name in ("run.json", "plan.json", "model.json")}
    with pytest.raises(CheckpointError, match=r"step-000006 is damaged: ") as raised:
        train(plan_of("byte_llama", Layout(tp=2)), evolve(RECIPE, steps=9), folder=folder, source=text)
    assert "remove that folder to continue from step-000003, the newest undamaged one; or" in str(raised.value)
    assert {name: (folder / name).read_bytes() for name in before} == before
    with pytest.raises(UserError, match=r"step-000006 is damaged: "):
        evaluate_run(folder, timeout=LIMIT)


def test_a_finished_run_is_evaluated_again(finished: tuple[Path, Summary], text: str, plan_of, capfd) -> None:
    folder, first = finished
    options = {"save_every": 3, "evaluate_batches": 2}
    again = train(plan_of("byte_llama", Layout(dp=2)), RECIPE, folder=folder, source=text, **options)
    assert (again.step, again.resumed, again.tokens, again.train_loss) == (6, 6, 0, None)
    assert again.held_out.tokens == 2 * 4 * 32 < first.held_out.tokens
    output = capfd.readouterr().out
    assert "resumed from the finished run" in output
    assert "options: evaluate-every was 4, is now 100, evaluate-batches was not given, is now 2" in output
    assert "evaluate-all was true, is now not given\n" in output


def test_a_model_beyond_the_memory_of_a_host_is_refused(plan_of, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("byte_llama", Layout(dp=2))
    monkeypatch.setattr(device, "gpu_count", lambda: 0)
    check_host_memory(plan)
    large = evolve(plan, predicted=evolve(plan.predicted, nbytes=({"weights": 2**43, "activations": 2**50},)))
    with pytest.raises(UserError, match=r"2 ranks need 16,384 GiB for weights.*\nthe plan is for 2xCPU: train"):
        check_host_memory(large)
    with pytest.raises(UserError, match=r"2 ranks need 16,384 GiB for weights.*\n.*: verify it there"):
        compare(large)


def contents(folder: Path) -> dict[Path, int]:
    """Return the time at which each file was written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_another_models_run_is_left_alone(finished: tuple[Path, Summary], text: str, plan_of) -> None:
    folder, _ = finished
    before = contents(folder)
    with pytest.raises(CheckpointError, match=r"holds checkpoints of another model: .*byte_llama(.|\n)*--out"):
        train(plan_of("byte_gpt", Layout(dp=2)), RECIPE, folder=folder, source=text)
    assert contents(folder) == before


def test_a_run_is_claimed(text: str, plan_of, tmp_path: Path) -> None:
    plan = plan_of("byte_llama", Layout())
    with locked(tmp_path), pytest.raises(UserError, match=r"another run is training in .*\nwait .* --out"):
        train(plan, RECIPE, folder=tmp_path, source=text)
    assert train(plan, evolve(RECIPE, steps=1), folder=tmp_path, source=text).step == 1


def test_a_vocabulary_without_all_bytes_is_refused(text: str, plan_of, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tiny-llama has a vocabulary of 127; text is read as bytes, .*\ndeclare"):
        train(plan_of("tiny_llama", Layout()), RECIPE, folder=tmp_path, source=text)


def test_a_plan_of_a_model_that_changed_is_refused(text: str, plan_of, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="the plan is for another model"):
        train(evolve(plan_of("byte_llama", Layout()), fingerprint="1-0"), RECIPE, folder=tmp_path, source=text)


def test_a_loss_that_is_no_number_stops_the_run(text: str, tmp_path: Path, plan_of) -> None:
    recipe = Recipe(steps=50, lr=1e3, warmup=0, clip_grad=1e12, eps=0)
    with pytest.raises(UserError, match=r"step \d+: loss .*: training has diverged\nfirst at .*\n.*a --lr below 1000"):
        train(plan_of("byte_gpt", Layout()), recipe, folder=tmp_path, source=text)
    assert not list(tmp_path.glob("step-*"))


def test_the_journal_drops_what_comes_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, last_step=0)
    for step in (1, 2, 3):
        first.write("step", step=step, loss=float(step))
    with path.open("ab") as file:
        file.write(b"\0\0\xff\n")  # what a file system may make of the last lines when the power fails
        file.write(b'{"event": "step", "st')  # killed in the midst of a line
    second = MetricsFile(path, last_step=2)
    second.write("step", step=3, loss=0.5)
    assert curve(tmp_path) == [1.0, 2.0, 0.5]


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (65, "1:05"), (7387, "2:03:07"), (59.6, "1:00")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text
