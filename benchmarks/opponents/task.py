"""One model and layout that several programs train, and what each prints of it. Part of `benchmarks.against_others`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from attrs import asdict, frozen

from benchmarks.opponents.turns import Turns

FIRST = 4  # steps that compile kernels and are not counted
ROUNDS = 3  # turns of each program
TURN = 6  # steps of a turn
STEPS = FIRST + ROUNDS * TURN
MARK = "RESULT "  # begins the line of a result


@frozen
class Task:
    """Sizes of a decoder with rotary attention, RMS norms and SwiGLU, its workload, and the degrees of a layout."""

    layers: int
    hidden: int
    ffn: int  # of one expert, where there are experts
    heads: int
    kv_heads: int
    vocab: int
    seq: int
    batch: int
    micro_batch: int
    head_size: int = 128
    experts: int = 0
    top_k: int = 0
    qk_norm: bool = False  # queries and keys are normalized for each head
    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1

    @classmethod
    def given(cls) -> Task:
        """Return the task in the first argument of this process."""
        return cls.of(sys.argv[1])

    @classmethod
    def of(cls, text: str) -> Task:
        """Return the task that `text` of a task says."""
        return cls(**json.loads(text))

    @property
    def text(self) -> str:
        """Return the task as text, which `of` reads."""
        return json.dumps(asdict(self))

    @property
    def world(self) -> int:
        """Return the number of processes."""
        return self.tp * self.cp * self.dp

    @property
    def microbatches(self) -> int:
        """Return the micro-batches of a step on each data-parallel rank."""
        return self.batch // self.micro_batch // self.dp


@frozen
class Result:
    """The step time, start and memory that a program measured for a task, and the size of its model."""

    step_ms: tuple[float, ...]  # median of each turn
    first_step_at: float  # time.time() at the end of the first step
    gib: float  # the most that torch allocated on any device
    parameters: int  # of the whole model

    @property
    def line(self) -> str:
        """Return the line that a program prints."""
        return MARK + json.dumps(asdict(self))


def start() -> torch.device:
    """Initialize torch.distributed of a process under torchrun, and return its device."""
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    if not gpu:
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", torch.cuda.current_device())


def timed(step: Callable[[], object], device: torch.device, turns: Turns) -> tuple[tuple[float, ...], float]:
    """Train `STEPS` steps. Return the median milliseconds of a step of each turn, and time.time() after the first step.

    Each turn waits until this program may use the devices alone.
    """
    step()
    synchronize(device)
    first_step_at = time.time()
    for _ in range(FIRST - 1):
        step()
    synchronize(device)
    medians = []
    for turn in range(ROUNDS):
        turns.begin(turn)
        took = []
        for _ in range(TURN):
            synchronize(device)
            begun = time.perf_counter()
            step()
            synchronize(device)
            took.append(1e3 * (time.perf_counter() - begun))
        turns.end(turn)
        medians.append(median(took))
    return tuple(medians), first_step_at


def measure(step: Callable[[], object], device: torch.device, parameters: int) -> None:
    """Train `STEPS` steps, and print the result on the first rank."""
    step_ms, first_step_at = timed(step, device, Turns.given())
    gib = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    most = torch.tensor([gib], device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(Result(step_ms, first_step_at, float(most), parameters).line, flush=True)
    dist.destroy_process_group()


def synchronize(device: torch.device) -> None:
    """Wait for the device and for all ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
