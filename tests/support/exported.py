"""Plans made by hand for the tests of exports, and Megatron-LM's command line as its own parser lists it."""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from attrs import evolve

from megaloom.dsl import Model, fingerprint, graph
from megaloom.dsl.catalog import find
from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.planner.export.decoder import read_decoder
from megaloom.planner.export.target import Target
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.search.search import plan as search
from tests.support.paths import TESTS

FLAGS = TESTS / "data" / "megatron_lm_flags.txt"

# Four models on layouts that take every part of a plan: uneven stages or not, with chunks or not, each recompute.
CASES: dict[str, tuple[str, Layout, tuple[int, ...], int]] = {
    "llama3-8b": (
        "64xH100",
        Layout(dp=4, tp=2, pp=4, vpp=4, cp=2, sequence_parallel=True, shard="optimizer"),
        (2,) * 16,
        8192,
    ),
    "mixtral-8x7b": (
        "128xH100",
        Layout(dp=32, pp=4, vpp=2, ep=8, shard="optimizer", recompute=Recompute.SELECTIVE),
        (3, 4, 4, 4, 4, 4, 5, 4),
        4096,
    ),
    "deepseek-v3": (
        "512xGB200",
        Layout(dp=32, pp=16, ep=32, shard="optimizer", recompute=Recompute.FULL),
        (3, *(4,) * 14, 2),
        4096,
    ),
    "deepseek-v3-mtp": (
        "256xH100",
        Layout(dp=8, pp=16, vpp=2, cp=2, ep=16, shard="optimizer"),
        (3, *(2,) * 29, 1, 0),  # what predicts a token ahead has a stage, and so have the heads
        4096,
    ),
    "gpt2": ("8xA100", Layout(dp=2, tp=2, pp=2, micro_batch=4), (7, 5), 1024),
}


@cache
def priced() -> Plan:
    """Some plan: exports read nothing of what is predicted."""
    model, ref = find("stdlib-gpt")
    return search(model, cluster("1xCPU"), Workload(seq=64, batch=1, precision=Precision.FP32), ref=ref).best


def case(name: str) -> tuple[Plan, Model]:
    """One of the four, and its model."""
    gpus, layout, counts, seq = CASES[name]
    model, ref = find(name)
    return made(model, layout, gpus=gpus, counts=counts, seq=seq, ref=ref), model


def made(
    model: Model,
    layout: Layout,
    *,
    gpus: str = "",
    counts: Sequence[int] = (),
    cuts: Sequence[int] = (),
    seq: int = 64,
    batch: int = 512,
    precision: str = "bf16",
    ref: str = "",
) -> Plan:
    """A plan of this layout, its stages with so many layers each, or cut at these nodes."""
    g, some = graph(model), priced()
    if counts:
        starts = read_decoder(g, Target.MEGATRON_LM).layer_starts
        cuts = [starts[sum(counts[:i])] for i in range(1, len(counts))]
    borders = pairwise((0, *cuts, len(g.nodes)))
    stages = (
        evolve(some.stages[0], rank=i % layout.pp, chunk=i // layout.pp, start=a, stop=b)
        for i, (a, b) in enumerate(borders)
    )
    return evolve(
        some,
        model=ref or model.name,
        fingerprint=fingerprint(model),
        cluster=cluster(gpus or f"{layout.world}xH100"),
        workload=Workload(seq=seq, batch=batch, precision=Precision(precision)),
        layout=layout,
        stages=tuple(stages),
        predicted=evolve(
            some.predicted,
            nbytes=some.predicted.nbytes * layout.pp,
            moments=some.predicted.moments * layout.pp,
        ),
    )


@cache
def parser() -> ArgumentParser:
    """Megatron-LM's own parser, as far as names, numbers of values and choices go."""
    made = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    for line in FLAGS.read_text().splitlines():
        if line.startswith("#"):
            continue
        names, dest, nargs, choices = (*line.split("\t"), "", "")[:4]
        options: dict[str, Any] = {"dest": dest, "default": None}
        if nargs == "0":
            options |= {"action": "store_true"}
        else:
            options |= {"nargs": {"None": None, "3": 3}.get(nargs, nargs), "choices": choices.split() or None}
        made.add_argument(*names.split(), **options)
    return made


def groups(script: str) -> dict[str, list[str]]:
    """The arrays of a shell script: their words by their names."""
    matches = re.findall(r"^([A-Z]+)=\(\n(.*?)^\)", script, re.M | re.S)
    return {name: shlex.split(words) for name, words in matches}


def parsed(script: str) -> Namespace:
    """What Megatron-LM is told by a script. Raises for an option that it has not, or a value that it refuses."""
    words = [word for group in groups(script).values() for word in group]
    return parser().parse_args(words)
