"""Defects that the runtime once had, put back one at a time, to see within how many draws the campaign finds each.

    python -m tests.support.parity.mutants             # a table; minutes
    python -m tests.support.parity.mutants P1 P2       # some of them

Draws that cannot reach a defect, such as those without an interleaved schedule, are counted and not run.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from attrs import evolve, frozen

from megaloom.dsl import Dot, Embed, LogSumExp, MoE, Op, Sum, graph
from megaloom.dsl.facts.primitives import program
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.module_kinds import runs_as_module
from megaloom.planner.contract.workload import Precision
from tests.support.parity.axes import kinds_of_experts, remainder
from tests.support.parity.feeds import Feed

if TYPE_CHECKING:
    from tests.support.parity.rank_pool import Case, Result

SEED, MOST = 1, 500  # draws
OF_THIS_RUN = re.compile(r"^megaloom\.[a-z_.]*|/\S*/megaloom-parity-\S* ?")  # modules and folders in an error


@contextmanager
def padded_training() -> Iterator[None]:
    """Pad the micro-batches of a training step to whole groups."""
    from megaloom.runtime.engine.pipeline_run import PipelineRun

    def padded(self: Any, samples: int) -> Any:
        return self.evaluation_part(samples, self.plan.layout.micro_batch)

    with patch.object(PipelineRun, "training_part", padded):
        yield


@contextmanager
def padding_in_sums() -> Iterator[None]:
    """Add up the padding of a dim whose axis has one device."""
    from megaloom.runtime.ops import products

    right = products._without_padding

    def without(here: Any, over: Any, *args: Any) -> Any:
        degrees = (here.groups.layout.degrees.get(here.axis(d), 1) for d in over)
        return right(here, over, *args) if max(degrees) > 1 else products.whole(here.out.op, here.out, *args)

    with patch.object(products, "_without_padding", without):
        yield


@contextmanager
def names_of_modules() -> Iterator[None]:
    """Save weights under other names where a module runs the layer than where its body does."""
    from megaloom.runtime.body.body_module import Body
    from megaloom.runtime.modules.built_node import BuiltNode

    right = BuiltNode.shards

    def shards(it: BuiltNode) -> Any:
        found = right(it)
        for factory in found.values() if found and not isinstance(it.module, Body) else ():
            factory.build_fn = partial(_renamed, factory.build_fn)
        return found

    with patch.object(BuiltNode, "shards", shards):
        yield


def _renamed(build: Any, *args: Any) -> Any:
    made = build(*args)
    for shard in made.values():
        if hasattr(shard, "global_shape"):
            shard.key += ".of_module"
    return made


@contextmanager
def shards_of_shared_tables() -> Iterator[None]:
    """Ask a table for its shards, although another chunk of the rank has its parameter."""
    from megaloom.runtime.modules.built_node import BuiltNode

    right = BuiltNode.shards

    def shards(it: BuiltNode) -> Any:
        if isinstance(it.node.op, Embed):
            it.module.state_dict()["weight"]
        return right(it)

    with patch.object(BuiltNode, "shards", shards):
        yield


@contextmanager
def one_kind_of_experts() -> Iterator[None]:
    """Move the corrections of all routers as one tensor, as megatron-core does."""
    from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias

    from megaloom.runtime.engine import pipeline_run

    with patch.object(
        pipeline_run, "move_corrections", lambda chunks, *_: _update_router_expert_bias(chunks, chunks[0].config)
    ):
        yield


@contextmanager
def unlike_products() -> Iterator[None]:
    """Multiply tensors of 32 and of 16 bits as they are."""
    from megaloom.runtime.ops import products

    right = products.product

    def product(x: Any, x_dims: Any, y: Any, y_dims: Any, out: Any) -> Any:
        return x @ y if x.dtype is not y.dtype else right(x, x_dims, y, y_dims, out)

    with patch.object(products, "product", product):
        yield


@contextmanager
def corrections_of_bodies() -> Iterator[None]:
    """Leave the corrections of experts that run by their bodies where they are."""
    from megaloom.runtime.body.body_module import Body
    from megaloom.runtime.body.corrections import corrections_of
    from megaloom.runtime.engine import pipeline_run

    right = pipeline_run.move_corrections

    def move(chunks: Any, *args: Any) -> None:
        bodies = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Body)]
        kept = [(c.value, c.value.clone()) for c in corrections_of(bodies)]
        right(chunks, *args)
        for value, before in kept:
            value.copy_(before)

    with patch.object(pipeline_run, "move_corrections", move):
        yield


@contextmanager
def uncompared_batches() -> Iterator[None]:
    """Let each rank train on the batch that it passes."""
    from megaloom.runtime.engine.shared_batches import SharedBatches

    with patch.object(SharedBatches, "of", lambda self, batch, **options: batch):
        yield


@contextmanager
def local_logits() -> Iterator[None]:
    """Let a step read its rank's columns of the logits, and report the sums of the first rank."""
    from megaloom.runtime.engine import pipeline_run
    from megaloom.runtime.engine.outputs import LocalOutputs

    right = LocalOutputs.whole

    def whole(self: Any, name: str) -> Any:
        return self._without_padding(name) if "vocab" in self.node(name).shape else right(self, name)

    with (
        patch.object(LocalOutputs, "whole", whole),
        patch.object(pipeline_run, "check_equal_sums", lambda *args: None),
    ):
        yield


@frozen
class Mutant:
    """A defect that can be put back."""

    text: str
    breaks: Callable[[], AbstractContextManager[None]]
    reaches: Callable[[Case], bool]  # False for draws that cannot differ


def _layouts(case: Case) -> list[Layout]:
    return [case.plan.layout, *([case.second.layout] if case.second else [])]


def _ops(case: Case) -> Iterator[Op]:
    """Yield the primitives of the layers of a model."""
    return (step.value.op for n in graph(case.make()).nodes for step in program(n).steps)


def _flips(case: Case, one: Layout, other: Layout) -> bool:
    """Return whether a layer runs as a module under one layout and by its body under the other."""
    nodes = graph(case.make()).nodes
    return any(runs_as_module(n, one.split) is not runs_as_module(n, other.split) for n in nodes if n.weights)


def _corrected(case: Case) -> bool:
    return any(isinstance(n.op, MoE) and n.op.corrected for n in graph(case.make()).nodes)


MUTANTS: dict[str, Mutant] = {
    "P1": Mutant(
        "micro-batches of training are padded to whole groups",
        padded_training,
        lambda c: any(remainder(p) for p in (c.plan, c.second) if p is not None),
    ),
    "P2": Mutant(
        "sums over a padded vocabulary count the padding at tp 1",
        padding_in_sums,
        lambda c: (
            any(x.tp == 1 and x.vocab_multiple > 1 for x in _layouts(c))
            and any(isinstance(op, Dot | Sum) and "vocab" in op.over for op in _ops(c))
        ),
    ),
    "P3": Mutant(
        "a checkpoint's names depend on whether a module or a body runs a layer",
        names_of_modules,
        lambda c: c.second is not None and _flips(c, *_layouts(c)),
    ),
    "P4": Mutant(
        "two chunks of a rank save one table",
        shards_of_shared_tables,
        lambda c: (
            c.second is not None
            and c.plan.layout.vpp > 1
            and sum(isinstance(n.op, Embed) for n in graph(c.make()).nodes) > 1
        ),
    ),
    "P5": Mutant(
        "corrections of several kinds of experts move as one tensor",
        one_kind_of_experts,
        lambda c: _corrected(c) and kinds_of_experts(c) > 1,
    ),
    "P6": Mutant(
        "products of 32 and 16 bits",
        unlike_products,
        lambda c: (
            c.plan.workload.precision is Precision.BF16 and any(isinstance(op, Sum | LogSumExp) for op in _ops(c))
        ),
    ),
    "N3": Mutant(
        "batches of the ranks that share one are not compared",
        uncompared_batches,
        lambda c: c.feed is Feed.BATCHES and any(x.world > x.dp for x in _layouts(c)),
    ),
    "N4": Mutant(
        "an own step sees its shard of the vocabulary, and its sums are not compared",
        local_logits,
        lambda c: c.feed is Feed.OWN_STEP and any(x.tp > 1 for x in _layouts(c)),
    ),
    "corrections": Mutant(
        "corrections of experts that run by their bodies do not move",
        corrections_of_bodies,
        _corrected,
    ),
}


def caught(name: str) -> tuple[int, int, Result | None]:
    """Return the number of draws until one differs with a defect put back, how many of them ran, and its result."""
    from tests.support.parity.drawn import drawn
    from tests.support.parity.rank_pool import run_cases

    mutant, ran = MUTANTS[name], 0
    for number in count():
        if number == MOST:
            return number, ran, None
        case = drawn(SEED, number)
        if not mutant.reaches(case):
            continue
        ran += 1
        (result,) = run_cases([evolve(case, broken=name)], case.processes)
        if not result.agrees:
            return number + 1, ran, result
    raise AssertionError


def what_is_seen(result: Result) -> str:
    """Return the error of a draw or its largest difference, and the first weights that differ."""
    if result.error:
        lines = [line.strip() for line in result.error.splitlines()]
        errors = [line for line in lines if "Error" in line.split(":")[0]]
        return OF_THIS_RUN.sub("", (errors or lines)[-1])[:100]
    kinds = ("loss", "norm", "gradient", "weight", "evaluation", "resumed")
    worst = max(kinds, key=lambda kind: getattr(result, f"{kind}_error"))
    named = f"; {', '.join(result.differing[:2])}" if result.differing else ""
    return f"{worst} {getattr(result, f'{worst}_error'):.1e}{named}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *MUTANTS], metavar="NAME")
    names = parser.parse_args().names or list(MUTANTS)
    missed = 0
    print("| defect | what is put back | draws until it is found | of these ran | seen |\n|---|---|---|---|---|")
    for name in names:
        draws, ran, result = caught(name)
        missed += result is None
        seen = "not found" if result is None else what_is_seen(result)
        print(f"| {name} | {MUTANTS[name].text} | {draws} | {ran} | {seen} |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
