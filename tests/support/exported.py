"""Plans with given layouts for the tests of exports, and the command-line parser of Megatron-LM."""

from __future__ import annotations

import ast
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

# Models on layouts that cover every part of a plan: even and uneven stages, one or several chunks, each recompute mode.
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
        (3, *(2,) * 29, 1, 0),  # the multi-token prediction block has a stage, and so have the heads
        4096,
    ),
    "gpt2": ("8xA100", Layout(dp=2, tp=2, pp=2, micro_batch=4), (7, 5), 1024),
}


@cache
def priced() -> Plan:
    """Return any plan. Exports do not read its prediction."""
    model, ref = find("stdlib-gpt")
    return search(model, cluster("1xCPU"), Workload(seq=64, batch=1, precision=Precision.FP32), ref=ref).best


def case(name: str) -> tuple[Plan, Model]:
    """Return the plan of a case, and its model."""
    gpus, layout, counts, seq = CASES[name]
    model, ref = find(name)
    return plan_with(model, layout, gpus=gpus, counts=counts, seq=seq, ref=ref), model


def plan_with(
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
    """Return a plan with this layout. counts: layers of each stage. cuts: the nodes at which stages begin."""
    g, some = graph(model), priced()
    if counts:
        starts = read_decoder(g, Target.MEGATRON_LM).layer_starts
        cuts = [starts[sum(counts[:i])] for i in range(1, len(counts))]
    borders = pairwise((0, *cuts, len(g.nodes)))
    stages = (
        evolve(some.stages[0], rank=i % layout.pp, chunk=i // layout.pp, start=a, stop=b)
        for i, (a, b) in enumerate(borders)
    )
    workload, machine = (
        Workload(seq=seq, batch=batch, precision=Precision(precision)),
        cluster(gpus or f"{layout.world}xH100"),
    )
    flops = some.predicted.flops_per_second_per_device
    return evolve(
        some,
        model=ref or model.name,
        fingerprint=fingerprint(model),
        cluster=machine,
        workload=workload,
        layout=layout,
        stages=tuple(stages),
        predicted=evolve(
            some.predicted,
            tokens_per_second_per_device=workload.tokens / some.predicted.step_seconds / layout.world,
            mfu=None if flops is None else flops / machine.device.flops.get(precision, 1e15),
            nbytes=some.predicted.nbytes * layout.pp,
            moments=some.predicted.moments * layout.pp,
        ),
    )


@cache
def parser() -> ArgumentParser:
    """Return a parser with the names, numbers of values and choices of Megatron-LM's options."""
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    for line in FLAGS.read_text().splitlines():
        if line.startswith("#"):
            continue
        names, dest, nargs, choices = (*line.split("\t"), "", "")[:4]
        options: dict[str, Any] = {"dest": dest, "default": None}
        if nargs == "0":
            options |= {"action": "store_true"}
        else:
            options |= {"nargs": {"None": None, "3": 3}.get(nargs, nargs), "choices": choices.split() or None}
        parser.add_argument(*names.split(), **options)
    return parser


def bridge_fields(script: str) -> dict[str, str]:
    """Return the fields that a script for Megatron-Bridge sets, section.name, with the text of their values."""
    calls = (node for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Call))
    container = next(call for call in calls if ast.unparse(call.func) == "ConfigContainer")
    return {
        f"{section.arg}.{one.arg}": ast.unparse(one.value)
        for section in container.keywords
        if isinstance(section.value, ast.Call)
        for one in section.value.keywords
    }


def titan_fields(module: str) -> dict[str, str]:
    """Return the fields that a Python configuration of torchtitan sets, with the text of their values.

    Sections are `section.name`; arguments of `model_registry` have the name of the model before theirs.
    """
    tree = ast.parse(module)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    models = [node.module.rpartition(".")[2] for node in tree.body if _imports_registry(node)]
    registry = next(call for call in calls if ast.unparse(call.func) == "model_registry")
    out = {f"model_spec.{model}.{one.arg}": ast.unparse(one.value) for model in models for one in registry.keywords}
    config = next(call for call in calls if ast.unparse(call.func) == "Trainer.Config")
    for section in config.keywords:
        out[str(section.arg)] = ast.unparse(section.value)
        for one in section.value.keywords if isinstance(section.value, ast.Call) else ():
            out[f"{section.arg}.{one.arg}"] = ast.unparse(one.value)
    return out


def _imports_registry(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and any(one.name == "model_registry" for one in node.names)


def groups(script: str) -> dict[str, list[str]]:
    """Return the arrays of a shell script: name → words."""
    matches = re.findall(r"^([A-Z]+)=\(\n(.*?)^\)", script, re.M | re.S)
    return {name: shlex.split(words) for name, words in matches}


def parsed(script: str) -> Namespace:
    """Return the options of a script, parsed. Raises ArgumentError for an unknown option or a wrong value."""
    words = [word for group in groups(script).values() for word in group]
    return parser().parse_args(words)
