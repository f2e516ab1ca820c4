"""Shared fixtures: one thread per process, no deadline for generated examples, plans by layout, the parity table."""

import gc
import os
import signal
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from attrs import evolve, fields
from hypothesis import settings

from tests.support.paths import TEST_MODELS

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch starts: ranks and test workers share the cores
os.environ.setdefault("MEGALOOM_MACHINE", "4xCPU")  # no test measures this machine, or depends on its cores
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a script's background jobs ignore it, and pass that on
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tests are the same everywhere: processes over gloo

gc.set_threshold(100_000, 50, 50)  # frequent collections took a sixth of all processor time

# No deadline: the machine is busy with other tests, and a slow example is no bug. MEGALOOM_EXAMPLES: of each law that
# does not set a number of its own.
EXAMPLES = int(os.environ.get("MEGALOOM_EXAMPLES", "100"))
settings.register_profile("megaloom", deadline=None, max_examples=EXAMPLES)
settings.load_profile("megaloom")

PARITY = "parity"  # the property under which a test records a row of the table

# Of the tests, these take longest together with their fixtures. They run first, so that no worker ends alone with one.
LONGEST = (
    *("test_parity.py", "test_own_layer.py", "test_resharding.py", "test_main.py", "test_stacked_experts.py"),
    *("test_checkpoint.py", "test_seeds.py", "test_fp16.py", "test_shared_weights.py", "test_experts.py"),
    *("test_drawn_parity.py", "test_averaged_weights.py", "test_own_steps.py", "test_shared_batches.py"),
    *("test_declared_names.py", "test_run.py", "test_dropout.py", "test_deterministic.py", "test_plan_is_built.py"),
    *("test_own_loop.py", "test_several_hosts.py", "test_finetune.py", "test_t5_over_stages.py", "test_faults.py"),
)


@pytest.fixture(scope="session")
def plan_of() -> Callable[..., Any]:
    """A plan under a layout, priced by the planner, of a model of small.py, or of file.py:name or an-example.

    `cuts` are stage borders of one's own.
    """

    @cache
    def make(
        name: str, layout: Any, *, cuts: tuple[int, ...] = (), batch: int = 4, seq: int = 32, precision: str = "fp32"
    ) -> Any:
        from megaloom.dsl import graph
        from megaloom.dsl.catalog import find
        from megaloom.planner.contract.workload import Precision, Workload
        from megaloom.planner.hardware.cluster_names import cluster
        from megaloom.planner.search.search import plan
        from tests.support.models.examples import model_named

        _, ref = find(f"{TEST_MODELS / 'small.py'}:{name}" if name.isidentifier() else name)
        model = model_named(ref)
        workload = Workload(seq=seq, batch=batch, precision=Precision(precision))
        fixed = {f.name: getattr(layout, f.name) for f in fields(type(layout))}
        best = plan(model, cluster(f"{layout.world}xCPU"), workload, ref=ref, fixed=fixed).best
        if cuts:
            borders = pairwise((0, *cuts, len(graph(model).nodes)))
            stages = (evolve(s, start=a, stop=b) for s, (a, b) in zip(best.stages, borders, strict=True))
            best = evolve(best, stages=tuple(stages))
        return best

    return make


def pytest_addoption(parser: Any) -> None:
    """--update writes golden files anew instead of comparing with them."""
    parser.addoption("--update", action="store_true", help="write golden files anew instead of comparing with them")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order tests by the time they take: those of LONGEST, others that start processes, the rest."""

    def order(item: pytest.Item) -> int:
        if item.path.name in LONGEST:
            return LONGEST.index(item.path.name)
        return len(LONGEST) + ("runtime" not in item.path.parts)

    items.sort(key=order)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the differences that the parity tests measured, one row per layout."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, ())]
    rows = [value for r in reports for key, value in getattr(r, "user_properties", ()) if key == PARITY]
    if rows:
        terminalreporter.section("parity: 2 optimizer steps under a layout against one process")
        terminalreporter.write_line(
            f"{'model':<18}{'layout':<68}{'loss differs by':>16}{'gradient norm':>16}{'gradients':>16}"
        )
        for model, layout, loss, norm, gradient in sorted(rows):
            terminalreporter.write_line(f"{model:<18}{layout:<68}{loss:>16.1e}{norm:>16.1e}{gradient:>16.1e}")
