"""Runs on indexed datasets: one order of samples under every layout and batch size, parts, conversations."""

import json
import shutil
from itertools import islice
from pathlib import Path

import pytest
from attrs import evolve

from megaloom.dsl import graph
from megaloom.dsl.errors import UserError
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe, Summary, read_data, shard, train
from megaloom.runtime.checkpoints.checkpoint_folder import checkpoint_folders, read
from megaloom.runtime.data.corpus import open_corpus
from megaloom.runtime.data.indexed import open_indexed
from megaloom.runtime.data.preprocess import preprocess
from megaloom.runtime.data.preprocess_options import Preprocessing
from megaloom.runtime.data.rows import Keys
from megaloom.runtime.launch import launcher
from megaloom.runtime.samples.samples import SampleMaker
from megaloom.runtime.training.evaluated_text import evaluated_data, open_texts
from megaloom.runtime.training.evaluation import evaluate_run
from megaloom.runtime.training.run_data import check_rampup, check_text
from tests.runtime.data.test_chat_template import CHATML, TALKS, with_template
from tests.support.limits import LIMIT
from tests.support.models.examples import model_named
from tests.support.models.small import byte_llama
from tests.support.paths import TEST_MODELS, TESTS

RECIPE = Recipe(steps=4, lr=1e-2, warmup=1)
CHAT_MODEL = f"{TEST_MODELS / 'chat.py'}:chat_decoder"


def events(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curve(folder: Path) -> list[object]:
    """Return the loss of each step."""
    return [e["loss"] for e in events(folder) if e["event"] == "step"]


def documents(folder: Path, file: Path) -> str:
    """Write the functions of a folder's tests as documents, one JSON object a line, and return the file."""
    functions = [text for path in sorted(folder.glob("test_*.py")) for text in path.read_text().split("\n\n\n")]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in functions))
    return str(file)


@pytest.fixture(scope="module")
def blend(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two datasets of one BPE with 257 tokens, and their weights."""
    folder = tmp_path_factory.mktemp("data")
    sources = [
        documents(TESTS / name, folder / f"{Path(name).name}.jsonl") for name in ("runtime/training", "planner/rules")
    ]
    first = Preprocessing(sources=(sources[0],), prefix=folder / "a", train_vocab=257, append_eos=True)
    tokenizer = {"train_vocab": None, "tokenizer": str(folder / "a-tokenizer")}
    for request in (first, evolve(first, sources=(sources[1],), prefix=folder / "b", **tokenizer)):
        preprocess(request, lambda text, done, total: None)
    return ["2", str(folder / "a"), "1", str(folder / "b")]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, blend: list[str], plan_of) -> tuple[Path, Summary]:
    """A run of four steps that saved every second, over two data-parallel processes."""
    folder = tmp_path_factory.mktemp("run")
    plan = plan_of("byte_llama", Layout(dp=2))
    every = {"save_every": 2, "evaluate_every": 3, "evaluate_all": True}
    return folder, train(plan, RECIPE, folder=folder, source=blend, split="94,4,2", **every)


def test_a_run_on_a_blend_is_evaluated_on_both_other_parts(
    finished: tuple[Path, Summary], blend: list[str], tmp_path: Path
) -> None:
    folder, done = finished
    corpus = open_corpus(blend, "94,4,2", tmp_path)
    assert corpus.validation and corpus.test
    assert done.unit == "nats per token"
    assert done.held_out.tokens == 32 * corpus.validation.held_out_samples(32)
    kinds = [(e["event"], e["step"]) for e in events(folder) if e["event"] in ("evaluation", "test")]
    assert kinds == [("evaluation", 3), ("evaluation", 4), ("test", 4)]
    assert done.test.loss == events(folder)[-1]["loss"]
    assert read(checkpoint_folders(folder)[-1]).manifest.data == corpus.digest
    assert (folder / "tokenizer" / "tokenizer.json").exists()
    assert not (folder / "data").exists()  # an indexed dataset is read where it is


def read_in_own_loop(plan: Plan, blend: list[str]) -> list[float]:
    """On each rank: losses of four steps on what `read_data` reads, and that of the validation and the test part."""
    engine = shard(model_named(plan.model), plan, RECIPE)
    data = read_data(engine, blend, split="94,4,2")
    losses = [engine.step(batch).loss for batch in islice(data.training(step=engine.done), RECIPE.steps)]
    return [*losses, engine.evaluate(data.validation()).loss, engine.evaluate(data.test()).loss]


def test_an_own_loop_reads_the_same_samples(finished: tuple[Path, Summary], blend: list[str], plan_of) -> None:
    folder, done = finished
    (losses,) = launcher.run(read_in_own_loop, (plan_of("byte_llama", Layout()), blend), 1, timeout=LIMIT)
    assert losses[:4] == pytest.approx(curve(folder), abs=1e-5)
    assert losses[4:] == pytest.approx([done.held_out.loss, done.test.loss], abs=1e-5)


def test_evaluated_by_dataset_it_has_the_loss_of_the_run(
    finished: tuple[Path, Summary], blend: list[str], tmp_path: Path
) -> None:
    folder, done = finished
    result = evaluate_run(folder, blend[1::2], part="validation", split="94,4,2")
    assert (result.step, [x.name for x in result.losses]) == (4, blend[1::2])
    results = [x.result for x in result.losses]
    tokens = sum(x.tokens for x in results)
    assert tokens == done.held_out.tokens
    assert sum(x.loss * x.tokens for x in results) / tokens == pytest.approx(done.held_out.loss, abs=1e-5)
    own = evaluate_run(folder)  # the run's own data, split and validation part
    assert (own.losses, own.part, own.split, own.notes) == (result.losses, "validation", "94,4,2", ())
    message = r"the test part of .*a by --split 100 has 0 tokens, too few for sequences of 32\ngive more"
    with pytest.raises(UserError, match=message):
        evaluate_run(folder, [blend[1]], part="test", split="100")
    with pytest.raises(UserError, match=r"is not a run folder: it has no plan.json\ngive the folder"):
        evaluate_run(tmp_path, [blend[1]])
    shutil.copy(folder / "plan.json", tmp_path)
    with pytest.raises(UserError, match=r"has no checkpoint\ntrain first: megaloom train .*plan.json"):
        evaluate_run(tmp_path, [blend[1]])


def test_all_parts_are_read_without_a_gap(finished: tuple[Path, Summary], blend: list[str], tmp_path: Path) -> None:
    """A source that is text has no split, and keeps no dataset from being split."""
    folder, whole = finished[0], open_indexed(Path(blend[1])).tokens
    data = evaluated_data(folder, [blend[1], "stdlib"], None, None)
    assert (data.part, data.split, data.split_of(blend[1]), data.split_of("stdlib")) == (
        "all",
        "94,4,2",
        "94,4,2",
        None,
    )
    maker = SampleMaker.of(graph(byte_llama()), 32)
    ((text,), digest) = open_texts(evaluated_data(folder, [blend[1]], None, "50,30,20"), folder, maker, tmp_path)
    assert [(r.start, r.stop) for r in text.part.ranges] == [(0, whole)]
    assert text.part.held_out_samples(32) == (whole - 1) // 32
    assert digest != open_texts(evaluated_data(folder, (), None, None), folder, maker, tmp_path)[1]
    with pytest.raises(UserError, match=r"has weights, but each source is evaluated by itself\nomit them: --data"):
        evaluated_data(folder, blend, None, None)
    with pytest.raises(UserError, match=r"--split 9,1 is for indexed datasets, and there is none in --data"):
        evaluated_data(folder, ["stdlib"], None, "9,1")
    with pytest.raises(UserError, match=r"--data is missing: .* does not say on which data it was trained"):
        evaluated_data(tmp_path, (), None, None)


def test_resumed_under_another_layout_it_reads_the_same_samples(
    finished: tuple[Path, Summary], blend: list[str], plan_of, tmp_path: Path, capfd
) -> None:
    folder = shutil.copytree(finished[0], tmp_path / "run")
    shutil.rmtree(folder / "step-000004")
    options = {"split": "94,4,2", "evaluate_all": True}
    done = train(plan_of("byte_llama", Layout(tp=2)), RECIPE, folder=folder, source=blend, **options)
    assert done.resumed == 2
    assert curve(folder) == pytest.approx(curve(finished[0]), abs=1e-5)
    assert done.test.loss == pytest.approx(finished[1].test.loss, abs=1e-5)
    assert "data: " not in capfd.readouterr().out


def test_resumed_with_another_batch_size_it_goes_on_at_the_next_sample(
    finished: tuple[Path, Summary], blend: list[str], plan_of, tmp_path: Path
) -> None:
    folder = shutil.copytree(finished[0], tmp_path / "run")
    shutil.rmtree(folder / "step-000004")
    plan = plan_of("byte_llama", Layout(), batch=2)
    train(plan, evolve(RECIPE, steps=3), folder=folder, source=blend, split="94,4,2")
    assert read(folder / "step-000003").manifest.samples == 2 * 4 + 2


def test_a_batch_that_grows_reads_every_sample_once(blend: list[str], plan_of, tmp_path: Path) -> None:
    recipe = evolve(RECIPE, rampup_batch=2, rampup_samples=8, steps=6)
    assert [recipe.batch_at(n, 6) for n in (0, 2, 4, 8, 14)] == [2, 2, 4, 6, 6]
    plan = plan_of("byte_llama", Layout(dp=2, micro_batch=1), batch=6)
    done = train(plan, recipe, folder=tmp_path / "run", source=blend, split="94,4,2", save_every=3)
    tokens = [e["tokens"] for e in events(tmp_path / "run") if e["event"] == "step"]
    assert [n // 32 for n in tokens] == [2, 4, 8, 14, 20, 26]  # type: ignore[operator]
    assert done.tokens == 26 * 32
    assert read(tmp_path / "run" / "step-000003").manifest.samples == 8
    with pytest.raises(UserError, match=r"--rampup-batch 3 is not a multiple of 2, the sequences"):
        check_rampup(evolve(recipe, rampup_batch=3, rampup_increment=3), plan)


def test_a_run_without_a_validation_part_says_so(blend: list[str], plan_of, tmp_path: Path, capfd) -> None:
    plan, one_step = plan_of("byte_llama", Layout()), evolve(RECIPE, steps=1)
    with pytest.raises(UserError, match=r"--keep-best 1 compares .* part of --split 9,0,1 is empty\ngive it a larger"):
        train(plan, one_step, folder=tmp_path / "run", source=blend, split="9,0,1", keep_best=1)
    assert not (tmp_path / "run").exists()
    train(plan, one_step, folder=tmp_path / "run", source=blend, split="9,0,1")
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if "held-out" in line] == [
        "no held-out loss: the validation part of --split 9,0,1 is empty; give it a larger share, such as --split 90,10"
    ]
    assert [e["event"] for e in events(tmp_path / "run")] == ["step", "checkpoint", "test"]


def test_a_run_on_conversations_learns_the_answers(plan_of, tmp_path: Path) -> None:
    source, tokenizer = tmp_path / "talks.jsonl", with_template(tmp_path / "chatml", CHATML)
    source.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))
    request = Preprocessing(
        sources=(str(source),), prefix=tmp_path / "chats", tokenizer=str(tokenizer), keys=Keys("messages")
    )
    preprocess(request, lambda text, done, total: None)
    data = str(tmp_path / "chats")
    plan = plan_of(CHAT_MODEL, Layout(), batch=2, seq=128)
    done = train(
        plan, Recipe(steps=1, lr=3e-2, warmup=1), folder=tmp_path / "run", source=data, split="80,20", epochs=4
    )
    assert done.step > 4  # epochs replace the steps of the recipe
    losses = curve(tmp_path / "run")
    assert losses[-1] < losses[0] - 1.5  # type: ignore[operator]
    without_mask = SampleMaker.of(graph(byte_llama()), 128)
    with pytest.raises(UserError, match=r"the data are conversations, .* the loss of byte-llama has no mask\n"):
        check_text(open_corpus([data], "80,20", tmp_path), without_mask)


def test_a_tokenizer_beyond_the_vocabulary_is_refused(blend: list[str], plan_of, tmp_path: Path) -> None:
    message = r"tiny-llama has a vocabulary of 127; the data.s tokenizer has 257 tokens \(a-tokenizer\)\ndeclare"
    with pytest.raises(UserError, match=message):
        train(plan_of("tiny_llama", Layout()), RECIPE, folder=tmp_path, source=blend)
    assert not any(tmp_path.iterdir())


def test_epochs_must_be_positive(blend: list[str], plan_of, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--epochs 0 is out of range\ngive a number above 0"):
        train(plan_of("byte_llama", Layout()), RECIPE, folder=tmp_path, source=blend, epochs=0)
