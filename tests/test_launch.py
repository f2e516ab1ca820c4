"""Starting ranks: what they return, what goes wrong in them, and that none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megaloom.dsl.errors import UserError
from megaloom.runtime import launch
from megaloom.runtime.launch import RankError

pytestmark = pytest.mark.timeout(60)
HERE = Path(__file__).parent


def summed(value):
    total = torch.tensor([float(dist.get_rank() + value)])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_results_come_in_the_order_of_ranks(world):
    total = float(sum(range(world)) + 10 * world)
    assert launch.run(summed, (10,), world, timeout=30) == [(rank, world, total) for rank in range(world)]


def fail(how, on):
    if dist.get_rank() == on:
        print("last words")
        if how == "raise":
            raise ArithmeticError("a real error")
        if how == "user":
            raise UserError("a batch of 7 does not divide")
        if how == "exit":
            sys.exit(3)
        if how == "vanish":
            sys.stdout.flush()
            os._exit(3)
        os.kill(os.getpid(), how)
    dist.barrier()  # where the others learn that a peer is gone


@pytest.mark.parametrize("on", [0, 2])
def test_the_real_error_is_told_not_its_consequences(on):
    with pytest.raises(RankError, match=f"^rank {on} failed:\n") as caught:
        launch.run(fail, ("raise", on), 4, timeout=30)
    assert caught.value.rank == on and "ArithmeticError: a real error" in caught.value.text
    assert 'in fail\n    raise ArithmeticError("a real error")' in caught.value.text


def test_a_user_error_stays_one():
    with pytest.raises(UserError, match=r"^a batch of 7 does not divide$"):
        launch.run(fail, ("user", 1), 2, timeout=30)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("exit", "rank 1 failed:\n.*SystemExit: 3"),
        ("vanish", r"rank 1 left with exit status 3.*\n.*  \| last words"),
        (signal.SIGKILL, r"rank 1 died of signal 9 \(SIGKILL\): often the kernel, out of memory"),
        (signal.SIGABRT, r"rank 1 died of signal 6 \(SIGABRT\)\nit was here:\n  File .* in fail\n"),
        (signal.SIGTERM, r"rank 1 died of signal 15 \(SIGTERM\)"),
    ],
)
def test_a_process_that_ends_without_an_error(how, told):
    with pytest.raises(RankError, match=f"(?s)^{told}"):
        launch.run(fail, (how, 1), 3, timeout=30)


def hang(on):
    if dist.get_rank() == on:
        time.sleep(1000)


def test_a_timeout_names_who_was_still_running_and_where():
    start = time.monotonic()
    with pytest.raises(RankError, match=r"^rank 1 ran out of time \(rank 1 of 2 had not") as caught:
        launch.run(hang, (1,), 2, timeout=1)
    assert "test_launch.py" in caught.value.text and "in hang" in caught.value.text
    assert time.monotonic() - start < 10


def absent_from_a_collective():
    if dist.get_rank():
        dist.barrier()


def test_a_rank_that_returns_too_early_is_told_of():
    with pytest.raises(RankError, match="rank 0 had already returned: not all ranks take part"):
        launch.run(absent_from_a_collective, (), 2, timeout=30)


def unpicklable():
    return lambda: None


def test_a_result_that_cannot_travel():
    with pytest.raises(RankError, match=r"rank 0 failed:\n(.*\n)*.*unpicklable"):
        launch.run(unpicklable, (), 1, timeout=30)


def test_no_ranks():
    with pytest.raises(UserError, match="1 or more would work"):
        launch.run(summed, (0,), 0)


def threads():
    return torch.get_num_threads()


def test_ranks_share_the_cores():
    world = 2 * len(os.sched_getaffinity(0))
    if "OMP_NUM_THREADS" not in os.environ:
        assert launch.run(threads, (), world, timeout=30) == [1] * world


LONG = """
import os, sys, time
from megaloom.runtime import launch
def entry():
    print(os.getpid(), flush=True)
    with open(sys.argv[1] + "/" + os.environ["RANK"], "w") as file:
        file.write(str(os.getpid()))
    time.sleep(1000)
if __name__ == "__main__":
    launch.run(entry, (), 2)
"""


def alive(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 1), (signal.SIGTERM, 143), (signal.SIGKILL, -9)], ids=lambda x: str(x)
)
def test_no_rank_outlives_the_process_that_started_it(number, code, tmp_path):
    script = tmp_path / "long.py"
    script.write_text(LONG)
    parent = subprocess.Popen([sys.executable, script, tmp_path], stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    files = [tmp_path / "0", tmp_path / "1"]
    while not all(file.exists() and file.read_text() for file in files):
        assert parent.poll() is None, parent.stderr.read()
        time.sleep(0.05)
    ranks = [int(file.read_text()) for file in files]
    assert all(map(alive, ranks))
    parent.send_signal(number)
    parent.communicate(timeout=20)
    assert parent.returncode == code or (number == signal.SIGINT and parent.returncode == -signal.SIGINT)
    deadline = time.monotonic() + 5
    while any(map(alive, ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
