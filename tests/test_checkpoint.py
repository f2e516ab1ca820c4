"""Checkpoints are whole or not there, belong to one model, and load under another layout than they were saved under."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.runtime import checkpoint, launch
from megaloom.runtime.checkpoint import KEEP, CheckpointError, Note, latest, read

ROWS = 12


class Table:
    """A state split by rows over all ranks, beside a count that all of them have."""

    def __init__(self, fill: float) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        rows = torch.arange(ROWS, dtype=torch.float32).reshape(world, -1, 1)[rank]
        self.done, self.share = 0, (rows * 10).expand(-1, 5) * fill

    def sharded_state(self, *, loading: bool = False) -> dict:
        from megatron.core.dist_checkpointing import ShardedTensor

        place = (0, dist.get_rank(), dist.get_world_size())
        return {"table": ShardedTensor.from_rank_offsets("table", self.share, place), "done": self.done}

    def load_state(self, state: dict) -> None:
        self.share, self.done = state["table"], state["done"]


def note(step: int) -> Note:
    return Note(
        step=step, samples=8 * step, model="m.py:m", fingerprint="feed", data="abc", recipe={"lr": 1e-3}, layout="dp2"
    )


def saved(run: Path, steps: tuple[int, ...]) -> list[str]:
    """On each rank: save a table that holds its step."""
    for step in steps:
        table = Table(step)
        table.done = step
        checkpoint.save(table, run, note(step))
    return sorted(path.name for path in run.iterdir())


def loaded(run: Path) -> tuple[int, list[list[float]]]:
    """On each rank: its share of the newest table."""
    table = Table(0)
    found = latest(run, fingerprint="feed")
    assert found
    checkpoint.load(table, found)
    return table.done, table.share.tolist()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with checkpoints of steps 10 and 20, of which the second was saved over an interrupted one."""
    run = tmp_path_factory.mktemp("run")
    (run / "step-000020.tmp").mkdir()
    (run / "step-000020.tmp" / "half").touch()
    launch.run(saved, (run, (10, 20)), 2, timeout=60)
    return run


@pytest.fixture
def run(two: Path, tmp_path: Path) -> Path:
    """A copy of it, to damage."""
    return shutil.copytree(two, tmp_path / "run")


@pytest.mark.parametrize("world", [1, 3, 4])
def test_loads_on_another_number_of_ranks(two: Path, world: int) -> None:
    shares = launch.run(loaded, (two,), world, timeout=60)
    assert [done for done, _ in shares] == [20] * world
    assert [row for _, share in shares for row in share] == [[200.0 * i] * 5 for i in range(ROWS)]


def test_keeps_the_last_and_leaves_nothing_aside(tmp_path: Path) -> None:
    (names,) = launch.run(saved, (tmp_path, (1, 2, 3, 4)), 1, timeout=60)
    assert names == ["step-000003", "step-000004"]
    assert len(names) == KEEP


def test_latest_is_the_newest_whole_one(two: Path) -> None:
    found = latest(two, fingerprint="feed")
    assert found
    assert evolve(found.note, files={}) == note(20)
    assert {"metadata.json", "common.pt", ".metadata"} < set(found.note.files)


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert latest(tmp_path, fingerprint="feed") is None
    assert latest(tmp_path / "nowhere", fingerprint="feed") is None


def test_one_that_is_being_written_does_not_count(run: Path) -> None:
    shutil.copytree(run / "step-000010", run / "step-000030.tmp")
    found = latest(run, fingerprint="feed")
    assert found
    assert found.folder.name == "step-000020"


def test_another_models_is_refused(two: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds checkpoints of another model: m\.py:m .*feed.*\n.*--out"):
        latest(two, fingerprint="dead")


def largest(folder: Path) -> Path:
    return max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)


def cut(folder: Path) -> None:
    data = largest(folder).read_bytes()
    largest(folder).write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: largest(f).unlink(), r"is damaged: .*\.distcp is missing or not of its size"),
        (cut, r"is damaged: .*\.distcp is missing or not of its size"),
        (lambda f: (f / "checkpoint.json").unlink(), r"has no readable checkpoint.json \(No such file"),
        (lambda f: (f / "checkpoint.json").write_text('{"step": '), "has a checkpoint.json that cannot be read"),
        (lambda f: (f / "checkpoint.json").write_text("[]"), "has a checkpoint.json that cannot be read"),
        (lambda f: (f / "checkpoint.json").write_text('{"version": 99}'), "has a checkpoint.json that cannot be read"),
    ],
)
def test_a_damaged_one_is_named_with_what_would_work(run: Path, damage, message: str) -> None:
    damage(run / "step-000020")
    with pytest.raises(CheckpointError, match=rf"checkpoint .*step-000020 {message}") as raised:
        latest(run, fingerprint="feed")
    assert "remove that folder to go on from step-000010, or give another one with --out" in str(raised.value)
    assert isinstance(raised.value, UserError)


def test_another_format_is_refused(run: Path) -> None:
    path = run / "step-000020" / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 7}))
    with pytest.raises(CheckpointError, match="has format 7, this program reads 1"):
        read(path.parent)


def test_one_flipped_bit_is_found_when_loading(run: Path) -> None:
    path = largest(run / "step-000020")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        CheckpointError, match=r"step-000020 is damaged: the bytes of .*distcp are not what was saved\n"
    ):
        launch.run(loaded, (run,), 2, timeout=60)


def test_one_that_lacks_a_tensor_is_refused(run: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"step-000020 cannot be loaded: .*other.*\nremove that folder to go on from"
    ):
        launch.run(misses, (run,), 2, timeout=60)


def misses(run: Path) -> None:
    """On each rank: load what was never saved."""
    table = Table(0)
    state = table.sharded_state()
    table.sharded_state = lambda loading: {"table": dataclasses.replace(state["table"], key="other")}  # type: ignore[method-assign]
    found = latest(run, fingerprint="feed")
    assert found
    checkpoint.load(table, found)


def test_a_failed_save_leaves_the_earlier_ones(run: Path) -> None:
    with pytest.raises(launch.RankError, match="no room"):
        launch.run(fails, (run,), 2, timeout=60)
    found = latest(run, fingerprint="feed")
    assert found
    assert found.folder.name == "step-000020"
    assert launch.run(loaded, (run,), 1, timeout=60)[0][0] == 20


def fails(run: Path) -> None:
    """On each rank: a save during which the second rank's disk is full."""
    table = Table(1)
    if dist.get_rank() == 1:
        table.sharded_state = _no_room  # type: ignore[method-assign]
    checkpoint.save(table, run, note(30))


def _no_room(*, loading: bool = False) -> dict:
    raise OSError(28, "no room")
