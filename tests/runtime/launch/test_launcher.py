"""Starting ranks: their results, their errors, and that no process is left running."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.layout import Layout
from megaloom.runtime.launch import launcher, rank, rank_environment
from megaloom.runtime.launch.launcher import RankError
from megaloom.runtime.megatron import device
from tests.support.limits import LIMIT


def summed(value):
    total = torch.tensor([float(dist.get_rank() + value)])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_results_come_in_the_order_of_ranks(world):
    total = float(sum(range(world)) + 10 * world)
    assert launcher.run(summed, (10,), world, timeout=LIMIT) == [(rank, world, total) for rank in range(world)]


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
        launcher.run(fail, ("raise", on), 4, timeout=LIMIT)
    assert caught.value.rank == on and "ArithmeticError: a real error" in caught.value.text
    assert 'in fail\n    raise ArithmeticError("a real error")' in caught.value.text


def test_a_user_error_stays_one():
    with pytest.raises(UserError, match=r"^a batch of 7 does not divide$"):
        launcher.run(fail, ("user", 1), 2, timeout=LIMIT)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("exit", "rank 1 failed:\n.*SystemExit: 3"),
        ("vanish", r"rank 1 exited with status 3 without an error message\nlast lines of its output:\n  \| last words"),
        (signal.SIGKILL, r"rank 1 was killed \(SIGKILL\), probably by the kernel because host memory ran out"),
        (signal.SIGABRT, r"rank 1 was killed \(SIGABRT\)\nstack:\n  File .* in fail\n"),
        (signal.SIGTERM, r"rank 1 was killed \(SIGTERM\)"),
    ],
)
def test_a_process_that_ends_without_an_error(how, message):
    with pytest.raises(RankError, match=f"(?s)^{message}"):
        launcher.run(fail, (how, 1), 3, timeout=LIMIT)


def hang(on):
    if dist.get_rank() == on:
        time.sleep(1000)


def test_a_timeout_names_who_was_still_running_and_where():
    start = time.monotonic()
    with pytest.raises(RankError, match=r"^rank 1 timed out \(rank 1 of 2 had not") as caught:
        launcher.run(hang, (1,), 2, timeout=1)
    assert "test_launcher.py" in caught.value.text and "in hang" in caught.value.text
    assert time.monotonic() - start < LIMIT


def hang_while_others_wait(on):
    if dist.get_rank() == on:
        time.sleep(1000)
    dist.barrier()


def test_a_rank_that_hangs_is_told_of_by_those_that_wait():
    second = datetime.timedelta(seconds=1)
    with pytest.raises(
        RankError, match=r"^rank 1 hangs: the other ranks have waited 0\.01\d+ min .*; stack:\n"
    ) as caught:
        launcher.run(hang_while_others_wait, (1,), 3, timeout=LIMIT, collective_timeout=second)
    assert "in hang_while_others_wait" in caught.value.text


def fail_to_connect():
    if dist.get_rank() == 0:
        raise RuntimeError("[gloo] connect to 127.0.0.1: Connection timed out")
    time.sleep(1000)


def test_a_connection_that_times_out_early_is_no_hang():
    with pytest.raises(RankError, match=r"^rank 0 failed:\n(.*\n)*.*Connection timed out"):
        launcher.run(fail_to_connect, (), 2, timeout=LIMIT)


def absent_from_a_collective():
    if dist.get_rank():
        dist.barrier()


def test_a_rank_that_returns_too_early_is_told_of():
    with pytest.raises(RankError, match="rank 0 had already returned: not all ranks call the same collectives"):
        launcher.run(absent_from_a_collective, (), 2, timeout=LIMIT)


def unpicklable():
    return lambda: None


def test_a_result_that_cannot_travel():
    with pytest.raises(RankError, match=r"rank 0 failed:\n(.*\n)*.*unpicklable"):
        launcher.run(unpicklable, (), 1, timeout=LIMIT)


def test_no_ranks():
    with pytest.raises(UserError, match="must be at least 1, got 0"):
        launcher.run(summed, (0,), 0)


def threads():
    return torch.get_num_threads()


def test_ranks_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(6))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [launcher.run(threads, (), world, timeout=LIMIT) for world in (1, 2, 4)] == [[6], [3] * 2, [1] * 4]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert launcher.run(threads, (), 1, timeout=LIMIT) == [2]


def product():
    x = torch.ones(600, 600, requires_grad=True)
    (x @ x).sum().backward()
    return x.grad.sum().item()


def test_ranks_compute_on_several_threads_though_their_parent_did_so_before(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    expected = product()
    torch.set_num_threads(before)
    assert launcher.run(product, (), 1, timeout=LIMIT) == [expected]


def note_and_sleep(folder):
    (folder / f"{dist.get_rank()}.part").write_text(str(os.getpid()))
    (folder / f"{dist.get_rank()}.part").rename(folder / f"{dist.get_rank()}.pid")
    time.sleep(1000)


def start_sleepers(folder):
    try:
        launcher.run(note_and_sleep, (folder,), 2)
    except KeyboardInterrupt:
        os._exit(130)


def alive(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def until(true):
    deadline = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_no_rank_outlives_the_process_that_started_it(number, code, tmp_path):
    device.prepare()
    parent = multiprocessing.get_context("fork").Process(target=start_sleepers, args=(tmp_path,))
    parent.start()
    until(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    ranks = [int(file.read_text()) for file in tmp_path.glob("*.pid")]
    assert all(map(alive, ranks))
    os.kill(parent.pid, number)
    parent.join(LIMIT)
    assert parent.exitcode == code
    until(lambda: not any(map(alive, ranks)))


def start_late(folder):
    """Ranks that take their time before they listen to signals."""
    belong = rank._die_with

    def late(parent):
        (folder / f"{os.getpid()}.pid").touch()
        time.sleep(0.5)
        belong(parent)

    rank._die_with = late
    try:
        launcher.run(time.sleep, (30,), 2, grace=30)
    except KeyboardInterrupt:
        os._exit(130)


def test_a_signal_in_the_midst_of_the_start_is_heeded(tmp_path):
    device.prepare()
    parent = multiprocessing.get_context("fork").Process(target=start_late, args=(tmp_path,))
    parent.start()
    until(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    os.kill(parent.pid, signal.SIGINT)
    parent.join(LIMIT)
    assert parent.exitcode == 130


def start_a_sleeper(folder, then):
    (folder / "pid").write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
    if then:
        os.kill(os.getpid(), then)


@pytest.mark.parametrize("then", [None, signal.SIGKILL])
def test_nothing_that_a_rank_started_outlives_it(then, tmp_path):
    with pytest.raises(RankError) if then else nullcontext():
        launcher.run(start_a_sleeper, (tmp_path, then), 1, timeout=LIMIT)
    until(lambda: not alive(int((tmp_path / "pid").read_text())))


def finish_on_request(folder, fails):
    requests = []
    signal.signal(signal.SIGTERM, lambda number, frame: requests.append(number))
    (folder / f"{dist.get_rank()}.pid").write_text(str(os.getpid()))
    until(lambda: requests)
    time.sleep(0.5)
    if fails:
        raise UserError("no room to save")
    (folder / f"{dist.get_rank()}.saved").touch()


def start_finishers(folder, fails):
    try:
        launcher.run(finish_on_request, (folder, fails), 2, grace=20)
    except KeyboardInterrupt:
        os._exit(130)
    except UserError:
        os._exit(2)


@pytest.mark.parametrize(("fails", "code"), [(False, 130), (True, 2)])
def test_ranks_may_finish_what_they_do_when_they_are_interrupted(fails, code, tmp_path):
    device.prepare()
    parent = multiprocessing.get_context("fork").Process(target=start_finishers, args=(tmp_path, fails))
    parent.start()
    until(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    os.kill(parent.pid, signal.SIGINT)
    parent.join(LIMIT)
    assert parent.exitcode == code
    assert len(list(tmp_path.glob("*.saved"))) == (0 if fails else 2)


def test_allocator_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert rank_environment.allocator_variables() == {}  # on CPUs
    monkeypatch.setattr(rank_environment.device, "gpu_count", lambda: 1)
    assert set(rank_environment.allocator_variables().values()) == {"expandable_segments:True"}
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    assert rank_environment.allocator_variables() == {}


def test_sharded_weights_have_more_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(rank_environment.CONNECTIONS, raising=False)
    due = {Layout(tp=2): "1", Layout(dp=2, shard="gradients"): "8", Layout(dp=2, tp=2, shard="weights"): "8"}
    for layout, connections in due.items():
        assert launcher.run(os.getenv, (rank_environment.CONNECTIONS,), layout, timeout=LIMIT) == (
            [connections] * layout.world
        )
    assert launcher.run(os.getenv, (rank_environment.CONNECTIONS,), 1, timeout=LIMIT) == ["1"]
