"""Inputs of the ranks, compared before the first step: under torchrun or srun each rank may read files of its own."""

from __future__ import annotations

import secrets
import socket
from hashlib import blake2b
from pathlib import Path

import torch.distributed as dist
from attrs import asdict

from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_form import fingerprint
from megaloom.planner.contract.layout import flag_of
from megaloom.planner.contract.planned_model import planned_model
from megaloom.planner.contract.plans import Plan
from megaloom.runtime.data.corpus import Corpus
from megaloom.runtime.data.indexed import INDEX_SUFFIX, TOKENS, open_indexed, path_of
from megaloom.runtime.launch.agreement import agreed, check_equal, from_first_rank, gathered

from .run_options import RunOptions

SAME_COMMAND = "start all ranks with one command, and give every host the same files"
BLOCKS, BLOCK_NBYTES = 64, 4096
"""Blocks of a file of data that are compared, and their size. Smaller files are compared whole."""


def check_same_plan(plan: Plan, options: RunOptions) -> None:
    """Raise UserError on all ranks unless all have one plan, model and options, and initial weights.

    Every rank calls it. Of a folder of weights, names and sizes of files are compared.
    """
    own = agreed(lambda: fingerprint(planned_model(plan)))
    planned = {flag_of(name): str(value) for name, value in {**asdict(plan.layout), **asdict(plan.workload)}.items()}
    stages = ", ".join(f"{s.start}-{s.stop}" for s in plan.stages)
    facts = {"the model's fingerprint": own, "the plan's model": plan.fingerprint, "the plan's stages": stages}
    if weights := options.start.weights:
        sizes = sorted((str(p.relative_to(weights)), p.stat().st_size) for p in weights.rglob("*") if p.is_file())
        facts[f"digest of {weights}"] = blake2b(repr(sizes).encode(), digest_size=6).hexdigest()
    check_equal({**facts, **planned, **options.compared()}, SAME_COMMAND)


def check_same_data(corpus: Corpus) -> None:
    """Raise UserError on all ranks unless all can read the data, and find the same there. Every rank calls it."""
    parts = [part for part in (corpus.train, corpus.validation, corpus.test) if part]
    prefixes = sorted({file.prefix for part in parts for r in part.ranges for file in r.dataset.files})
    check_equal(
        agreed(lambda: {str(prefix): _contents(prefix) for prefix in prefixes}),
        "copy the dataset to every host again, or give --data on storage that all hosts share",
    )


def check_shared_folder(folder: Path) -> None:
    """Raise UserError on all ranks unless every rank sees in a run folder what rank 0 writes. Every rank calls it."""
    path = folder / f".ranks-{from_first_rank(lambda: secrets.token_hex(8))}"
    if not dist.get_rank():
        path.touch()
    dist.barrier()
    hosts = gathered((socket.gethostname(), path.exists()))
    if not dist.get_rank():
        path.unlink()
    for rank, (host, sees) in enumerate(hosts):
        if not sees:
            raise UserError(
                f"rank {rank} ({host}) does not see {folder} of rank 0 ({hosts[0][0]})\n"
                "give --out on storage that all hosts share: checkpoints have files of all ranks"
            )


def _contents(prefix: Path) -> str:
    """Return the number of tokens of a dataset, and a digest of blocks of its files."""
    dataset, digest = open_indexed(prefix), blake2b(digest_size=6)
    for path in (path_of(prefix, suffix) for suffix in (INDEX_SUFFIX, TOKENS)):
        size = path.stat().st_size
        with path.open("rb") as file:
            for i in range(BLOCKS):
                file.seek(max(0, size - BLOCK_NBYTES) * i // (BLOCKS - 1))
                digest.update(file.read(BLOCK_NBYTES))
    return f"{dataset.tokens:,} tokens with digest {digest.hexdigest()}"
