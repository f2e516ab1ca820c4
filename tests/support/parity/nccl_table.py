"""Families x layouts of two GPUs over NCCL, in fp32 and bf16, each compared with one process on one of these GPUs.

python -m tests.support.parity.nccl_table                           # all; the same command goes on where it stopped
python -m tests.support.parity.nccl_table --precisions bf16 --families llama t5
python -m tests.support.parity.nccl_table --report                  # prints the tables of what has run
CUDA_VISIBLE_DEVICES=2,3 python -m tests.support.parity.nccl_table  # beside another process

The ranks start once. First each of them computes half of the references, alone. Then both run all cases, ordered by
layout, and process groups are made anew for each layout. The result of a case is appended to `--output` at once. If a
case takes longer than `--timeout`, or ends on one rank only, the ranks start again for the rest. No case begins later
than `--limit` seconds after the start. Without GPUs two CPU ranks do the same over gloo.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterable, Sequence
from pathlib import Path

from attrs import evolve

from megaloom.dsl import graph
from megaloom.dsl.errors import UserError
from megaloom.planner import violations
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.rules.capabilities import runtime_violations
from megaloom.runtime.launch import launcher
from megaloom.runtime.megatron import device
from tests.support.models.gpu import SEQ, WIDE
from tests.support.parity.nccl_ranks import BATCH, LAYOUTS, RANKS, Job, model_of, running, work
from tests.support.parity.nccl_rows import Key, Row, append, failed, read, report

PRECISIONS = (Precision.FP32, Precision.BF16)
NO_EXPERTS = "no-experts"  # the rule that refuses EP2 for a model without experts
MOST_FAILED_STARTS = 2


def refusal(key: Key, gpu: str) -> str | None:
    """Return the sentence by which a rule refuses a case, "" if the model has no experts to shard, or None."""
    g, machine = graph(model_of(key.family)), cluster(f"{RANKS}x{gpu}")
    load, layout = Workload(seq=SEQ, batch=BATCH, precision=Precision(key.precision)), LAYOUTS[key.layout]
    for found in (*violations(layout, g, load, machine), *runtime_violations(layout, g, load, machine)):
        text = str(found)
        return "" if NO_EXPERTS in text else text
    return None


def run(keys: Sequence[Key], job: Job) -> list[Key]:
    """Run the cases that the file of a job lacks, and return those that are left when the time is over."""
    left, failed_starts = _legal(keys, job.gpu, job.output), 0
    with tempfile.TemporaryDirectory(prefix="megaloom-nccl-") as folder:
        job = evolve(job, folder=Path(folder))
        while left and time.monotonic() < job.until and failed_starts < MOST_FAILED_STARTS:
            failure = _start(left, job)
            ended = read(job.output)
            remaining = [key for key in left if key not in ended]
            failed_starts += bool(failure) and remaining == left
            left = remaining
            if not failure:
                break
    return left


def _start(keys: Sequence[Key], job: Job) -> str:
    """Start the ranks, and return how they failed or "". Record that of the case that ran."""
    try:
        launcher.run(work, (keys, job), RANKS)
    except (UserError, launcher.RankError) as error:
        failure = str(error).strip()
        print(failure, flush=True)
        key = running(job.folder)
        if key is not None and key not in read(job.output):
            append(job.output, failed(key, failure))
        return failure
    return ""


def _legal(keys: Iterable[Key], gpu: str, output: Path) -> list[Key]:
    """Return the cases that the file lacks and no rule refuses; record the sentences of the others."""
    known, found = read(output), []
    for key in (key for key in keys if key not in known):
        sentence = refusal(key, gpu)
        if sentence is None:
            found.append(key)
        elif sentence:
            append(output, Row.of(key, refused=sentence))
    return found


def options() -> Namespace:
    """Return the options of the command line."""
    parser = ArgumentParser("nccl_table", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(WIDE), choices=list(WIDE), metavar="FAMILY")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS), metavar="LAYOUT")
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), type=Precision, metavar="PRECISION")
    parser.add_argument("--output", type=Path, default=Path("nccl_table.jsonl"), help="file of results to append to")
    parser.add_argument(
        "--timeout", type=float, default=90, help="seconds of a case; a reference may take twice as long"
    )
    parser.add_argument("--limit", type=float, default=450, help="seconds after which no case begins")
    parser.add_argument("--usual-kernels", action="store_true", help="run also kernels that are not deterministic")
    parser.add_argument("--report", action="store_true", help="print the tables of what has run, and run nothing")
    return parser.parse_args()


def main() -> int:
    asked = options()
    keys = [Key(f, x, str(p)) for x in asked.layouts for f in asked.families for p in asked.precisions]
    left, until = list[Key](), time.monotonic() + asked.limit
    if not asked.report:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products
        gpu = device.local_cluster().partition("x")[2]
        left = run(keys, Job(gpu, asked.output, asked.timeout, until, not asked.usual_kernels))
    rows = {key: row for key, row in read(asked.output).items() if key in set(keys)}
    print(report(rows, list(LAYOUTS)))
    print(f"{len(left)} cases are left for the next command" if left else "no case is left")
    return 0 if all(row.agrees or row.refused for row in rows.values()) and not left else 1


if __name__ == "__main__":
    sys.exit(main())
