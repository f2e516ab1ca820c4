"""Ranks connect before any of them goes on, and a rank that cannot connect is the one that is named."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megaloom.runtime.launch import launcher
from megaloom.runtime.launch.launcher import RankError
from tests.support.limits import LIMIT
from tests.support.parity.rank_pool import process_group

SLOW = 0.5
"""Seconds for which a rank is connected and does not know: the scheduler runs other processes."""


def slow(create: Callable[..., None], on: int, folder: Path) -> Callable[..., None]:
    """Return init_process_group that takes longer on one rank, and leaves a file there at its end."""

    def init_process_group(*args: Any, rank: int, **named: Any) -> None:
        create(*args, rank=rank, **named)
        if rank == on:
            time.sleep(SLOW)
            (folder / f"{rank}").touch()

    return init_process_group


def connected_before(on: int, folder: Path) -> bool:
    """Return whether a rank had connected as this rank began, and leave at once."""
    before = (folder / f"{on}").exists()
    dist.destroy_process_group()
    return before


@pytest.mark.parametrize("on", [0, 1])
def test_no_rank_begins_before_all_have_connected(on, tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "init_process_group", slow(dist.init_process_group, on, tmp_path))
    assert launcher.run(connected_before, (on, tmp_path), 2, timeout=LIMIT) == [True, True]


def again(on: int, folder: Path) -> bool:
    """Return whether a rank had connected in a second world as this rank began there."""
    store: Any = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group = slow(dist.init_process_group, on, folder)
    with process_group(store, "second", rank, 2):
        return (folder / f"{on}").exists()


def test_nor_in_a_second_world_of_the_same_processes(tmp_path):
    assert launcher.run(again, (1, tmp_path), 2, timeout=LIMIT) == [True, True]


@pytest.mark.parametrize("on", [0, 2])
def test_the_rank_that_cannot_connect_is_named(on, monkeypatch):
    create = dist.init_process_group

    def init_process_group(*args: Any, rank: int, **named: Any) -> None:
        if rank == on:
            raise RuntimeError("no route to host")
        named["timeout"] = timedelta(seconds=LIMIT)
        create(*args, rank=rank, **named)

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    with pytest.raises(RankError, match=f"(?s)^rank {on} failed:\n.*no route to host$"):
        launcher.run(connected_before, (on, Path()), 3, timeout=LIMIT)
    assert not multiprocessing.active_children()
