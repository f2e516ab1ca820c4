"""Measure what an optimizer step pays so that the ranks of one data-parallel rank train on one batch.

    python -m benchmarks.batches            # 2 tensor-parallel ranks, 8 sequences of 4,096 tokens
    python -m benchmarks.batches 4 64 8192  # ranks, sequences, tokens

It prints the milliseconds of a call in which all ranks pass the batch, of one that compares the batches, and of one in
which only the first rank has it; then the mean over a thousand steps.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from megaloom.dsl import graph
from megaloom.dsl.catalog import find
from megaloom.planner.contract.layout import Layout
from megaloom.runtime.launch import launcher

CALLS = 30
VOCAB = 50_000


def main() -> None:
    """Print the times."""
    ranks, sequences, tokens = (int(a) for a in sys.argv[1:]) if len(sys.argv) > 1 else (2, 8, 4096)
    passed, compared, broadcast = launcher.run(measure, (ranks, sequences, tokens), ranks)[0]
    from megaloom.runtime.engine.shared_batches import COMPARED_EVERY, COMPARED_FIRST

    number = COMPARED_FIRST + (1000 - COMPARED_FIRST) // COMPARED_EVERY
    mean = (number * compared + (1000 - number) * passed) / 1000
    print(f"{ranks} tensor-parallel ranks, {sequences} sequences of {tokens} tokens, medians of {CALLS} calls:")
    for name, milliseconds in (
        ("all ranks pass the batch", passed),
        ("and it is compared", compared),
        ("only the first rank passes it", broadcast),
        ("mean of 1,000 steps in which all pass it", mean),
    ):
        print(f"  {name:<42}{milliseconds:8.3f} ms")


def measure(ranks: int, sequences: int, tokens: int) -> tuple[float, float, float]:
    """On each rank: return the median milliseconds of a call that passes, that compares and that broadcasts."""
    from megaloom.runtime.megatron import device

    device.prepare()
    import torch
    import torch.distributed as dist

    from megaloom.runtime.engine.shared_batches import SharedBatches
    from megaloom.runtime.megatron.process_groups import create_process_groups

    groups = create_process_groups(Layout(tp=ranks))
    shared = SharedBatches(groups, graph(find("stdlib-gpt")[0]), tokens, more=False)
    text = torch.randint(VOCAB, (sequences, tokens + 1), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": text[:, :-1], "labels": text[:, 1:]}

    def median(given: Any, calls: int) -> float:
        times = []
        for _ in range(CALLS):
            shared.calls = calls
            dist.barrier()
            start = time.perf_counter()
            shared.of(given, training=True)
            times.append((time.perf_counter() - start) * 1e3)
        return statistics.median(times)

    return median(batch, 5), median(batch, 0), median(batch if dist.get_rank() == 0 else None, 5)


if __name__ == "__main__":
    main()
