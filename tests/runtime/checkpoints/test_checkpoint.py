"""Checkpoints are whole or not there, belong to one model, and load under another layout than they were saved under."""

import dataclasses
import json
import re
import resource
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Precision
from megaloom.runtime.checkpoints.checkpoint_folder import (
    NONE_INTACT,
    CheckpointError,
    Retention,
    latest,
    newest_intact,
    read,
)
from megaloom.runtime.checkpoints.manifest import Manifest, SavedFile, manifest_checksum, manifest_to_json
from megaloom.runtime.launch import launcher
from megaloom.runtime.optimizer.recipe import Recipe
from tests.support.batches import next_token
from tests.support.limits import LIMIT
from tests.support.models.examples import model_named
from tests.support.paths import TEST_MODELS, TESTS

ROWS = 12


class Table:
    """A state sharded by rows over all ranks, and a count that every rank has."""

    def __init__(self, fill: float) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        rows = torch.arange(ROWS, dtype=torch.float32).reshape(world, -1, 1)[rank]
        self.done, self.share = 0, (rows * 10).expand(-1, 5) * fill

    def sharded_state(self, *, loading: bool = False) -> dict:
        from megatron.core.dist_checkpointing import ShardedTensor

        coordinates = (0, dist.get_rank(), dist.get_world_size())
        return {"table": ShardedTensor.from_rank_offsets("table", self.share, coordinates), "done": self.done}

    def load_state(self, state: dict) -> None:
        self.share, self.done = state["table"], state["done"]


def manifest(step: int) -> Manifest:
    return Manifest(
        step=step, samples=8 * step, model="m.py:m", fingerprint="1-feed", data="abc", recipe={"lr": 1e-3}, layout="dp2"
    )


def saved(run: Path, steps: tuple[int, ...]) -> list[str]:
    """On each rank: save a table that holds its step."""
    from megaloom.runtime.checkpoints import checkpoint

    for step in steps:
        table = Table(step)
        table.done = step
        checkpoint.save(table, run, manifest(step))
    return sorted(path.name for path in run.iterdir())


def loaded(run: Path) -> tuple[int, list[list[float]]]:
    """On each rank: its share of the newest table."""
    from megaloom.runtime.checkpoints import checkpoint

    table = Table(0)
    result = checkpoint.newest_on_ranks(run, fingerprint="1-feed")
    assert result
    checkpoint.load(table, result)
    return table.done, table.share.tolist()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with checkpoints of steps 10 and 20, of which the second was saved over an interrupted one."""
    run = tmp_path_factory.mktemp("run")
    (run / "step-000020.tmp").mkdir()
    (run / "step-000020.tmp" / "half").touch()
    launcher.run(saved, (run, (10, 20)), 2, timeout=LIMIT)
    return run


@pytest.fixture
def run(two: Path, tmp_path: Path) -> Path:
    """A copy of it, to damage."""
    return shutil.copytree(two, tmp_path / "run")


@pytest.mark.parametrize("world", [1, 3, 4])
def test_loads_on_another_number_of_ranks(two: Path, world: int) -> None:
    shares = launcher.run(loaded, (two,), world, timeout=LIMIT)
    assert [done for done, _ in shares] == [20] * world
    assert [row for _, share in shares for row in share] == [[200.0 * i] * 5 for i in range(ROWS)]


def test_keeps_the_last_and_leaves_nothing_aside(tmp_path: Path) -> None:
    (names,) = launcher.run(saved, (tmp_path, (1, 2, 3, 4)), 1, timeout=LIMIT)
    assert names == ["step-000003", "step-000004"]


def test_latest_is_the_newest_whole_one(two: Path) -> None:
    checkpoint = latest(two, fingerprint="1-feed")
    assert checkpoint
    assert evolve(checkpoint.manifest, files={}) == manifest(20)
    assert {"metadata.json", "common.pt", ".metadata"} < set(checkpoint.manifest.files)


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert latest(tmp_path, fingerprint="1-feed") is None
    assert latest(tmp_path / "nowhere", fingerprint="1-feed") is None


def test_one_that_is_being_written_does_not_count(run: Path) -> None:
    shutil.copytree(run / "step-000010", run / "step-000030.tmp")
    checkpoint = latest(run, fingerprint="1-feed")
    assert checkpoint
    assert checkpoint.folder.name == "step-000020"


def test_another_models_is_refused(two: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds checkpoints of another model: m\.py:m .*feed.*\n.*--out"):
        latest(two, fingerprint="1-dead")


def test_an_older_fingerprint_is_left_to_the_comparison_of_weights(run: Path) -> None:
    """Fingerprints of another form cannot be compared: the names and shapes of all weights decide."""
    changed(run / "step-000020", fingerprint="feed")
    assert launcher.run(loaded, (run,), 1, timeout=LIMIT)[0][0] == 20
    with pytest.raises(
        CheckpointError, match=r"step-000020 cannot be loaded: .*Some keys found in the checkpoint are missing"
    ):
        launcher.run(loaded_as_nothing, (run,), 1, timeout=LIMIT)


def loaded_as_nothing(run: Path) -> None:
    """On each rank: load into a state that lacks a tensor of the checkpoint."""
    from megaloom.runtime.checkpoints import checkpoint

    table = Table(0)
    table.sharded_state = lambda loading: {"done": 0}  # type: ignore[method-assign]
    result = latest(run, fingerprint="1-feed")
    assert result
    checkpoint.load(table, result)


def largest(folder: Path) -> Path:
    return max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)


def cut(folder: Path) -> None:
    data = largest(folder).read_bytes()
    largest(folder).write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: largest(f).unlink(), r"is damaged: .*\.distcp is missing or has the wrong size"),
        (cut, r"is damaged: .*\.distcp is missing or has the wrong size"),
        (lambda f: (f / "checkpoint.json").unlink(), r"has no readable checkpoint.json \(No such file"),
        (lambda f: (f / "checkpoint.json").write_text('{"step": '), "has an invalid checkpoint.json"),
        (lambda f: (f / "checkpoint.json").write_text("[]"), "has an invalid checkpoint.json"),
        (
            lambda f: (f / "checkpoint.json").write_text('{"version": 99}'),
            "has format 99; this megaloom reads formats 1 to 3",
        ),
    ],
)
def test_a_damaged_one_is_skipped_with_a_message(run: Path, damage, message: str) -> None:
    damage(run / "step-000020")
    with pytest.raises(CheckpointError, match=rf"checkpoint .*step-000020 {message}") as raised:
        read(run / "step-000020")
    assert isinstance(raised.value, UserError)
    checkpoint = latest(run, fingerprint="1-feed")
    assert checkpoint
    assert checkpoint.folder.name == "step-000010"
    assert re.search(message, checkpoint.skipped[0])
    damage(run / "step-000010")
    with pytest.raises(
        CheckpointError, match=rf"step-000020 {message}"
    ) as raised:  # starting anew would overwrite them
        latest(run, fingerprint="1-feed")
    fix = str(raised.value).splitlines()[1]
    if "format 99" in message:  # a good checkpoint is never removed
        assert fix == "install the megaloom that wrote it, or choose another folder with --out"
    else:
        assert (
            fix == f"{NONE_INTACT}: remove the 2 step-… folders to start at step 0, or choose another folder with --out"
        )


def changed(folder: Path, **fields: object) -> None:
    """Change fields of a checkpoint.json, with a checksum that fits."""
    path = folder / "checkpoint.json"
    raw = {name: value for name, value in {**json.loads(path.read_text()), **fields}.items() if name != "checksum"}
    path.write_text(json.dumps({**raw, "checksum": manifest_checksum(raw)}))


@pytest.mark.parametrize("fields", [{"samples": -5}, {"files": {}}, {"files": {"../x": {"nbytes": 1, "crc32": 1}}}])
def test_a_manifest_that_no_save_writes_is_refused(run: Path, fields: dict[str, object]) -> None:
    changed(run / "step-000020", **fields)
    with pytest.raises(CheckpointError, match=r"has an invalid checkpoint\.json"):
        read(run / "step-000020")


def test_a_manifest_that_was_changed_is_refused(run: Path) -> None:
    path = run / "step-000020" / "checkpoint.json"
    path.write_text(path.read_text().replace('"samples": 160', '"samples": 168'))
    with pytest.raises(CheckpointError, match=r"has an invalid checkpoint\.json"):
        read(path.parent)


def test_swapped_folders_are_no_checkpoints(run: Path) -> None:
    """The newest would resume at the wrong step, and be the first that is removed."""
    old, new = run / "step-000010", run / "step-000020"
    old.rename(run / "aside")
    new.rename(old)
    (run / "aside").rename(new)
    with pytest.raises(CheckpointError, match=r"step-000020 is that of step 10: its folder has another name"):
        latest(run, fingerprint="1-feed")


def test_a_save_moves_a_damaged_folder_of_its_name_aside(run: Path) -> None:
    cut(run / "step-000020")
    (names,) = launcher.run(saved, (run, (20,)), 1, timeout=LIMIT)
    assert names == ["step-000010", "step-000020", "step-000020.damaged"]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    losses = {1: 3.0, 2: 1.0, 3: float("nan"), 4: 2.0, 5: 2.5}
    for step, loss in losses.items():
        files = {".metadata": SavedFile(0, 0)}
        made = evolve(manifest(step), validation_loss=loss, files=files)
        (tmp_path / made.folder_name).mkdir()
        (tmp_path / made.folder_name / ".metadata").touch()
        (tmp_path / made.folder_name / "checkpoint.json").write_text(manifest_to_json(made))
    assert (tmp_path / "step-000002-loss-1.0000").is_dir()
    newest = tmp_path / "step-000005-loss-2.5000"
    names = [path.name[:11] for path in Retention(last=1, best=2).superseded(tmp_path, newest)]
    assert names == ["step-000001", "step-000003"]
    step_4 = tmp_path / "step-000004-loss-2.0000"
    names = [path.name[:11] for path in Retention(last=1).superseded(tmp_path, step_4)]
    assert names == ["step-000001", "step-000002", "step-000003"]  # step 5 could not be loaded, or it would go on there
    (newest / ".metadata").unlink()  # damaged: the newest whole one is then step 4
    names = [path.name[:11] for path in Retention(last=1).superseded(tmp_path, newest)]
    assert names == ["step-000001", "step-000002", "step-000003"]
    with pytest.raises(UserError, match="--keep-last must be at least 1, got 0"):
        Retention(last=0)


def test_another_format_is_refused(run: Path) -> None:
    path = run / "step-000020" / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 7}))
    with pytest.raises(CheckpointError, match="has format 7; this megaloom reads formats 1 to 3"):
        read(path.parent)


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def sound(run: Path) -> tuple[str, tuple[str, ...]]:
    """On each rank: the name of the newest sound checkpoint, and the messages about newer ones."""
    from megaloom.runtime.checkpoints import checkpoint

    found = checkpoint.newest_on_ranks(run, fingerprint="1-feed")
    return (found.folder.name, found.skipped) if found else ("", ())


def test_one_flipped_bit_is_found_and_the_older_one_is_loaded(run: Path) -> None:
    flip_bit(largest(run / "step-000020"))
    outcomes = launcher.run(sound, (run,), 2, timeout=LIMIT)
    assert [name for name, _ in outcomes] == ["step-000010", "step-000010"]
    for _, (message,) in outcomes:
        assert re.search(r"step-000020 is damaged: the contents of .*distcp have changed$", message)
    found = newest_intact(run, fingerprint="1-feed")
    assert found and (found.folder.name, found.skipped) == outcomes[0]
    assert found.notes == [f"skipped: {outcomes[0][1][0]}; using step-000010"]
    flip_bit(run / "step-000010" / "common.pt")  # nothing sound is left, and starting anew would overwrite them
    with pytest.raises(CheckpointError, match=r"step-000020 is damaged: the contents of .*distcp have changed\n"):
        launcher.run(sound, (run,), 2, timeout=LIMIT)


def test_one_that_lacks_a_tensor_is_refused(run: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"step-000020 cannot be loaded: it has no tensor 'other'; it was saved from m.py:m under dp2\n"
        r"give the model that it was saved from, or choose another folder with --out$",
    ):
        launcher.run(load_missing_tensor, (run,), 2, timeout=LIMIT)


def load_missing_tensor(run: Path) -> None:
    """On each rank, load a tensor that was never saved."""
    from megaloom.runtime.checkpoints import checkpoint

    table = Table(0)
    state = table.sharded_state()
    table.sharded_state = lambda loading: {"table": dataclasses.replace(state["table"], key="other")}  # type: ignore[method-assign]
    result = latest(run, fingerprint="1-feed")
    assert result
    checkpoint.load(table, result)


def test_a_save_without_room_leaves_the_earlier_ones(run: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"^cannot save step 30 in .*: (file too large|torch failed to write a file)\. "
    ) as raised:
        launcher.run(cramped, (run,), 2, timeout=LIMIT)
    assert re.search(r"Step 20 is saved; .* and run the same command again$", str(raised.value))
    checkpoint = latest(run, fingerprint="1-feed")
    assert checkpoint
    assert checkpoint.folder.name == "step-000020"
    assert not list(run.glob("*.tmp"))
    assert launcher.run(loaded, (run,), 1, timeout=LIMIT)[0][0] == 20


def cramped(run: Path) -> None:
    """On each rank: a save, the second rank being unable to write more than some bytes."""
    from megaloom.runtime.checkpoints import checkpoint

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        checkpoint.save(Table(1), run, manifest(30))
    finally:  # it has yet to write what became of it
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


TP2, DIVIDED = Layout(tp=2, sequence_parallel=True), Layout(dp=2, shard="optimizer")
OWN = f"{TEST_MODELS / 'own_layers.py'}:some_experts"
PADDED = f"{TEST_MODELS / 'own_layers.py'}:hashed_odd"
SHARED = f"{TEST_MODELS / 'shared_weights.py'}"
BUFFERS = f"{TEST_MODELS / 'own_layers.py'}:buffers"
RESHARDINGS = {
    "tied and padded, divided optimizer to TP2 SP PP2": ("tiny_gpt", DIVIDED, evolve(TP2, pp=2)),
    "tied and padded, TP2 SP PP2 to divided optimizer": ("tiny_gpt", evolve(TP2, pp=2), DIVIDED),
    "shared by blocks, PP2 VPP2 with a divided optimizer to TP2 SP": (
        f"{SHARED}:albert",
        evolve(DIVIDED, pp=2, vpp=2),
        TP2,
    ),
    "shared buffers, TP2 to PP2 VPP2": (f"{SHARED}:positions_again", Layout(tp=2), Layout(pp=2, vpp=2)),
    "PP2 VPP2 to PP4": ("deep_llama", Layout(pp=2, vpp=2), Layout(pp=4)),
    "TP4 with fewer KV heads to one process": ("tiny_llama", evolve(TP2, tp=4), Layout()),
    "experts, EP2 with a divided optimizer to one process": ("tiny_mixtral", evolve(DIVIDED, ep=2), Layout()),
    "experts, one process to EP2 PP2": ("tiny_mixtral", Layout(), Layout(dp=2, ep=2, pp=2)),
    "corrected and shared experts, EP2 to TP2 SP": ("tiny_deepseek_v3", Layout(dp=2, ep=2), TP2),
    "norms of queries and keys, PP2 to TP2 SP": ("tiny_qwen3", Layout(pp=2), TP2),
    "experts with biases, TP2 SP EP2 to one process": ("tiny_gpt_oss", evolve(TP2, ep=2), Layout()),
    "own bodies, TP2 SP to a divided optimizer": (OWN, TP2, DIVIDED),
    "own experts, EP2 TP2 SP to one process": (OWN, evolve(TP2, ep=2), Layout()),
    "own padded table, TP2 SP to one process": (PADDED, TP2, Layout()),
    "own padded table, one process to TP2 SP": (PADDED, Layout(), TP2),
    "buffers, TP2 SP to one process": (BUFFERS, TP2, Layout()),
    "buffers, one process to TP2 SP": (BUFFERS, Layout(), TP2),
    "buffers, EP2 to ETP2 TP2 SP": (BUFFERS, Layout(dp=2, ep=2), evolve(TP2, etp=2)),
    "own bodies, PP2 to TP2 SP": (OWN, Layout(pp=2), TP2),
    "dropout, to the same layout": ("tiny_gpt_dropout", TP2, TP2),
}


@pytest.mark.parametrize("case", RESHARDINGS)
def test_training_goes_on_under_another_layout(case: str, plan_of, tmp_path: Path) -> None:
    """Weights, both moments of the optimizer, its count of steps, the learning rate, what dropout draws: all came."""
    name, before, after = RESHARDINGS[case]
    straight = launcher.run(trained, (plan_of(name, before), tmp_path, 0, 4), before.world, timeout=LIMIT)[0]
    resumed = launcher.run(trained, (plan_of(name, after), tmp_path, 2, 4), after.world, timeout=LIMIT)[0]
    assert len(resumed) == 2
    for ours, theirs in zip(resumed, straight[2:], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


def trained(plan: Plan, run: Path, start: int, stop: int) -> list[tuple[float, float]]:
    """On each rank: (loss, gradient norm, learning rate) of steps; saved after the second, loaded to start there."""
    from megaloom.runtime.checkpoints import checkpoint
    from megaloom.runtime.engine.engine import Engine

    engine = Engine.build(plan, model_named(plan.model), Recipe(steps=10, warmup=3, lr=1e-2))
    outcome = latest(run, fingerprint="1-feed")
    assert bool(outcome) == bool(start)
    if outcome:
        checkpoint.load(engine.state, outcome)
    results = []
    for step in range(start, stop):
        source = torch.Generator().manual_seed(step)
        tokens = torch.randint(127, (plan.workload.batch, plan.workload.seq + 1), generator=source)
        result = engine.step(lambda i, tokens=tokens: next_token(tokens[i]))
        results.append((result.loss, result.grad_norm, result.lr))
        if engine.done == 2:
            checkpoint.save(engine.state, run, manifest(2))
    return results


@pytest.mark.parametrize("to", [Precision.FP32, Precision.BF16])
def test_bf16_masters_and_moments_come_along_to_the_bit(to: Precision, plan_of, tmp_path: Path) -> None:
    before, after = plan_of("tiny_gpt", DIVIDED, precision="bf16"), plan_of("tiny_gpt", TP2, precision=to)
    launcher.run(trained, (before, tmp_path / "a", 0, 2), 2, timeout=LIMIT)
    launcher.run(copied, (after, tmp_path / "a", tmp_path / "b"), 2, timeout=LIMIT)
    names, different = launcher.run(differences, (tmp_path / "a", tmp_path / "b"), 1, timeout=LIMIT)[0]
    assert len(names) == 3 * (2 * 16 + 4)
    assert different == []


def copied(plan: Plan, run: Path, other: Path) -> None:
    """On each rank: load a checkpoint and save it again."""
    from megaloom.runtime.checkpoints import checkpoint
    from megaloom.runtime.engine.engine import Engine

    engine = Engine.build(plan, model_named(plan.model), Recipe())
    result = latest(run, fingerprint="1-feed")
    assert result
    checkpoint.load(engine.state, result)
    checkpoint.save(engine.state, other, manifest(2))


def differences(run: Path, other: Path) -> tuple[list[str], list[str]]:
    """The names of all tensors of a checkpoint, and of those that are not bitwise the same in another."""
    from megatron.core.dist_checkpointing import load_plain_tensors

    ours, theirs = (load_plain_tensors(str(folder / "step-000002")) for folder in (run, other))
    assert ours.keys() == theirs.keys()
    names = [name for name in ours if torch.is_tensor(ours[name])]
    return names, [name for name in names if not torch.equal(ours[name], theirs[name])]


GOLDEN = TESTS / "golden" / "checkpoint-v1"


@pytest.mark.parametrize("layout", [Layout(), TP2, DIVIDED], ids=str)
def test_the_golden_checkpoint_loads_and_training_goes_on(layout: Layout, plan_of) -> None:
    """Saved before graphs had a JSON form: its fingerprint has another form, its weights have today's names."""
    expected = json.loads((GOLDEN / "expected.json").read_text())
    plan = plan_of("golden_llama", layout, seq=16)
    steps = launcher.run(continued, (plan, GOLDEN), layout.world, timeout=LIMIT)[0]
    for step, golden in zip(steps, expected, strict=True):
        assert step == pytest.approx(golden, abs=1e-5)


def test_the_golden_checkpoint_of_another_model_is_refused(plan_of) -> None:
    with pytest.raises(CheckpointError, match=r"step-000002 cannot be loaded: "):
        launcher.run(continued, (plan_of("tiny_llama", Layout(), seq=16), GOLDEN), 1, timeout=LIMIT)


def continued(plan: Plan, run: Path) -> list[dict[str, float]]:
    """On each rank: steps 3 and 4 from a checkpoint of step 2."""
    from megaloom.runtime.checkpoints import checkpoint
    from megaloom.runtime.engine.engine import Engine

    engine = Engine.build(plan, model_named(plan.model), Recipe(steps=10, warmup=3, lr=1e-2))
    outcome = latest(run, fingerprint=plan.fingerprint)
    assert outcome and not outcome.manifest.has_comparable_fingerprint
    checkpoint.load(engine.state, outcome)
    steps = []
    for step in (2, 3):
        tokens = torch.arange(4 * 17).reshape(4, 17) * (step + 3) % 61
        result = engine.step(lambda i, tokens=tokens: next_token(tokens[i]))
        steps.append({"loss": result.loss, "grad_norm": result.grad_norm, "lr": result.lr})
    return steps
