"""Ranks that torchrun or srun started find each other by what these leave in the environment."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import socket
import time

import pytest
import torch.distributed as dist

from megaloom.dsl.errors import UserError
from megaloom.runtime.launch import launcher
from megaloom.runtime.launch.rendezvous import (
    TORCHRUN,
    _from_slurm,
    join,
    started_by_launcher,
)
from megaloom.runtime.megatron import device


@pytest.fixture
def environment(monkeypatch):
    """Sets the environment of a process that somebody else started, and only that."""
    for name in list(os.environ):
        if name in TORCHRUN or name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    return lambda **variables: [monkeypatch.setenv(name, value) for name, value in variables.items()]


def test_a_process_by_itself_is_not_inside(environment):
    assert not started_by_launcher()
    environment(SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="1")  # a shell that srun or salloc gave
    assert not started_by_launcher()
    environment(SLURM_STEP_NUM_TASKS="2")
    assert started_by_launcher()


def test_an_incomplete_environment_is_told(environment):
    environment(RANK="0", WORLD_SIZE="2")
    with pytest.raises(UserError, match="LOCAL_RANK, MASTER_ADDR, MASTER_PORT are not"):
        join()


def test_a_world_of_another_size_is_told(environment):
    environment(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="here", MASTER_PORT="1")
    with pytest.raises(UserError, match="the plan is for 8 ranks, but 2 were started"):
        join(8)
    environment(WORLD_SIZE="two")
    with pytest.raises(UserError, match="WORLD_SIZE='two'"):
        join(8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": "3"}, "RANK=3 is not a rank of WORLD_SIZE=2, which are 0 to 1"),
        ({"RANK": "-1"}, "RANK=-1 is not a rank of WORLD_SIZE=2"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 is not a rank of WORLD_SIZE=2"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 is no number of ranks"),
    ],
)
def test_ranks_that_cannot_be_are_refused_before_they_wait(changed, message, environment):
    given = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    environment(**{**given, **changed})
    with pytest.raises(UserError, match=f"^{message}.*\nstart all ranks with one torchrun or srun, or unset RANK"):
        join()


def free_port():
    with socket.create_server(("localhost", 0)) as free:
        return str(free.getsockname()[1])


@pytest.mark.parametrize(
    ("number", "message"),
    [
        ("0", r"2 of 3 ranks have not come within 0.01 min \(--distributed-timeout-minutes\) \(ranks 1 and 2\)\nstart"),
        ("2", r"rank 0 has not come within 0.01 min .*: nothing listens at localhost:\d+ \(MASTER_ADDR, MASTER_PORT\)"),
    ],
)
def test_ranks_that_do_not_come_are_counted(number, message, environment):
    environment(RANK=number, WORLD_SIZE="3", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT=free_port())
    with pytest.raises(UserError, match=message):
        join(timeout=datetime.timedelta(minutes=0.01))


def test_a_port_in_use_and_an_unknown_host_are_told(environment):
    with socket.create_server(("localhost", 0)) as used:
        port = str(used.getsockname()[1])
        environment(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT=port)
        with pytest.raises(UserError, match="the port is in use\nchoose another MASTER_PORT"):
            join()
    environment(RANK="1", MASTER_ADDR="no.such.host.invalid")
    with pytest.raises(UserError, match=r"MASTER_ADDR=no\.such\.host\.invalid has no address"):
        join()


def test_no_ranks_are_started_by_a_rank(environment):
    environment(RANK="0")
    with pytest.raises(UserError, match="unset RANK"):
        launcher.run(os.getpid, (), 2)


def joined(folder, number, variables):
    os.environ.update(variables)
    join(2)
    everyone = [None, None]
    dist.all_gather_object(everyone, number)  # by rank
    (folder / str(number)).write_text(str(everyone))


@pytest.mark.parametrize(
    "names",
    [
        {"RANK": "{}", "WORLD_SIZE": "2", "LOCAL_RANK": "{}", "MASTER_ADDR": "localhost", "MASTER_PORT": "{port}"},
        {"SLURM_PROCID": "{}", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "{}", "SLURM_STEP_NODELIST": "localhost",
         "MASTER_PORT": "{port}"},
    ],
    ids=["torchrun", "srun"],
)  # fmt: skip
def test_joining(names, environment, tmp_path):
    device.prepare()
    port = free_port()
    context = multiprocessing.get_context("fork")
    ranks = []
    for number in range(2):
        variables = {name: value.format(number, port=port) for name, value in names.items()}
        ranks.append(context.Process(target=joined, args=(tmp_path, number, variables)))
        ranks[-1].start()
    for number, rank in enumerate(ranks):
        rank.join(30)
        assert rank.exitcode == 0
        assert (tmp_path / str(number)).read_text() == "[0, 1]"


def test_ranks_that_torchrun_restarts_find_each_other(environment, tmp_path):
    """The store of torchrun's agent has what the ranks before them have left there."""
    device.prepare()
    agent = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    environment(TORCHELASTIC_RUN_ID="7", TORCHELASTIC_USE_AGENT_STORE="True", MASTER_PORT=str(agent.port))
    environment(MASTER_ADDR="localhost", WORLD_SIZE="2")
    context = multiprocessing.get_context("fork")
    for attempt in (0, 1):
        (folder := tmp_path / str(attempt)).mkdir()
        variables = [{"RANK": str(n), "LOCAL_RANK": str(n)} for n in range(2)]
        ranks = [context.Process(target=joined, args=(folder, n, given)) for n, given in enumerate(variables)]
        for rank in reversed(ranks):
            rank.start()
            time.sleep(0.5 * attempt)  # the second one looks for the first one before that has written its address
        for rank in ranks:
            rank.join(30)
        assert [rank.exitcode for rank in ranks] == [0, 0]
        assert [(folder / str(n)).read_text() for n in range(2)] == ["[0, 1]"] * 2


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu-[003-006,11]", "gpu-003"), ("login1,gpu-[1-2]", "login1"), ("c7.example.org", "c7.example.org")],
)
def test_the_first_node_of_a_step_is_where_ranks_meet(nodes, first, environment):
    environment(SLURM_STEP_NODELIST=nodes, SLURM_JOB_ID="123456")
    assert _from_slurm() == {"MASTER_ADDR": first, "MASTER_PORT": "23456"}
