"""A checkpoint that is written while training goes on has the state of its step, and counts only when it is whole."""

import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from megaloom.runtime.checkpoints.checkpoint_folder import CheckpointError, Retention, checkpoint_folders
from megaloom.runtime.launch import launcher
from tests.runtime.checkpoints.test_checkpoint import ROWS, Table, loaded, manifest
from tests.support.limits import LIMIT


def changed_meanwhile(run: Path) -> list[str]:
    """On each rank: save steps 10 and 20, and change the state before it is written. Return the names before that."""
    from megaloom.runtime.checkpoints.saver import Saver
    from megaloom.runtime.checkpoints.shard_writer import PlannedWriter

    hold, write = threading.Event(), PlannedWriter.write
    PlannedWriter.write = lambda self: hold.wait(LIMIT) and write(self)  # type: ignore[method-assign,assignment]
    saver, before = Saver(run, Retention(last=1), asynchronous=True), []
    for step in (10, 20):
        hold.clear()
        table = Table(step)
        saver.start(table, manifest(step))
        table.share *= 0  # as an optimizer step does
        assert saver.is_writing
        before += [path.name for path in checkpoint_folders(run)]
        hold.set()
        saved = saver.finish()
        assert saved
        assert saved.manifest == manifest(step)
        assert 0 < saved.stall_seconds < saved.seconds
        assert saver.finish() is None
    saver.close()
    return before


def test_it_has_the_state_of_its_step_and_counts_when_it_is_whole(tmp_path: Path) -> None:
    for before in launcher.run(changed_meanwhile, (tmp_path,), 2, timeout=LIMIT):
        assert before == ["step-000010"]  # while step 20 was written
    assert [path.name for path in tmp_path.iterdir()] == ["step-000020"]  # one is kept
    shares = launcher.run(loaded, (tmp_path,), 2, timeout=LIMIT)
    assert [row[0] for _, share in shares for row in share] == [200.0 * i for i in range(ROWS)]


def failed_meanwhile(run: Path) -> str:
    """On each rank: save step 10, then fail to write rank 1's part of step 20. Return the message."""
    from megaloom.runtime.checkpoints.saver import Saver
    from megaloom.runtime.checkpoints.shard_writer import PlannedWriter

    def full(self: PlannedWriter) -> None:
        raise OSError(28, "No space left on device")

    saver = Saver(run, asynchronous=True)
    saver.start(Table(10), manifest(10))
    saver.finish()
    if dist.get_rank() == 1:
        PlannedWriter.write = full  # type: ignore[method-assign]
    saver.start(Table(20), manifest(20))
    with pytest.raises(CheckpointError) as raised:
        saver.finish()
    return str(raised.value)


def test_a_failure_in_the_background_is_raised_on_all_ranks(tmp_path: Path) -> None:
    for message in launcher.run(failed_meanwhile, (tmp_path,), 2, timeout=LIMIT):
        assert message.startswith(f"cannot save step 20 in {tmp_path}: no space left on the device (needs 0.2 KiB, ")
        assert message.endswith("Step 10 is saved; free some space and run the same command again")
    assert [path.name for path in tmp_path.iterdir()] == ["step-000010"]
