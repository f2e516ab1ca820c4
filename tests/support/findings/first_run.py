"""Findings on starts, signals, evaluations at the end, and the first run on a machine."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.support.findings.finding import Verdict, finding, megaloom, plan, refuses


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def launched(rank: int, world: int) -> dict[str, str]:
    """Return the variables of a rank that somebody started by hand."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }


@finding("users 13", "A rank beyond WORLD_SIZE, and ranks that do not come, end in torch's traceback", Verdict.REFUSED)
def wrong_launch(folder: Path) -> str:
    refuses(megaloom(folder, "train", "stdlib-gpt", "--devices", "2", **launched(3, 1)), "RANK=3 is not a rank of")
    short = ("train", "stdlib-gpt", "--distributed-timeout-minutes", "0.02")
    return refuses(megaloom(folder, *short, **launched(0, 3)), "2 of 3 ranks have not come within 0.02 min")


@finding("users 14", "--devices that differs from WORLD_SIZE is found only after the timeout", Verdict.REFUSED)
def other_world(folder: Path) -> str:
    ended = megaloom(folder, "train", "stdlib-gpt", "--devices", "2", "--tp", "2", seconds=100, **launched(0, 3))
    return refuses(ended, "the plan is for 2 ranks, but 3 were started")


def verify_large(folder: Path) -> str:
    """Verify a plan that this machine cannot hold."""
    plan(folder, "llama3-8b", "--gpus", "8xH100", "--pp", "1", "-o", "large.json")
    ended = megaloom(folder, "verify", "large.json", seconds=60)
    return refuses(ended, "8 ranks need", "the plan is for 8xH100: verify it there, or a smaller model here")


for name in ("newcomer A2", "fuzz D7"):
    finding(name, "`verify` of a plan for GPUs eats the memory of a machine without", Verdict.REFUSED)(verify_large)
