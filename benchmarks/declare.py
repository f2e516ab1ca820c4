"""Seconds to declare a model and derive its facts: `python benchmarks/declare.py [MODEL ...]`, best of five.

import: `import megaloom.dsl` in a new process. declare: the program, whose shapes are checked as it runs. graph: the
nodes in order, with names of their weights. facts: parameters, FLOPs and saved activations of each node, with empty
caches. identity: the fingerprint. DeepSeek-V3 has 10 distinct layers in 372 nodes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from time import perf_counter

from megaloom.dsl import (
    Model,
    fingerprint,
    flops,
    graph,
    params,
    saved,
)
from megaloom.dsl.catalog import examples
from megaloom.dsl.facts import costs, primitives

MODELS = ("gpt2", "llama3-405b", "mixtral-8x22b", "t5-11b", "mamba2-2-7b", "nemotron-h-8b", "deepseek-v3")
TIMES = 5
IMPORT = """
from sys import modules
from time import perf_counter
start = perf_counter()
import megaloom.dsl
print(perf_counter() - start)
assert not {"torch", "networkx", "numpy"} & modules.keys()
"""


def imported() -> float:
    """Return the seconds to import the package in a new process, which loads neither torch nor networkx."""
    return float(subprocess.run([sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True).stdout)


def timed(work: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    start = perf_counter()
    work()
    return perf_counter() - start


def clear_caches() -> None:
    """Clear the caches of graphs, primitives and costs."""
    for cache in (graph, costs._costs, primitives.program, primitives._program):
        cache.cache_clear()


def derive_facts(m: Model) -> None:
    """Compute the parameters, FLOPs and saved activations of a model."""
    params(m)
    flops(m, batch=1, seq=4096)
    saved(graph(m).nodes, batch=1, seq=4096)


def times(declaration: Callable[[], Model]) -> tuple[float, ...]:
    """Return the seconds of each step: declare, graph, facts, identity."""
    models: list[Model] = []
    clear_caches()
    declare = timed(lambda: models.append(declaration()))
    (m,) = models
    return declare, timed(lambda: graph(m)), timed(lambda: derive_facts(m)), timed(lambda: fingerprint(m))


def main() -> None:
    print(f"import megaloom.dsl  {min(imported() for _ in range(TIMES)):.3f}")
    print(f"{'model':<16}{'nodes':>6}{'declare':>10}{'graph':>10}{'facts':>10}{'identity':>10}{'in all':>10}")
    for ref in sys.argv[1:] or MODELS:
        module, _, name = examples()[ref].partition(":")
        declaration = getattr(sys.modules[module], name)
        best = tuple(map(min, zip(*(times(declaration) for _ in range(TIMES)), strict=True)))
        row = "".join(f"{t:>10.3f}" for t in (*best, sum(best)))
        print(f"{ref:<16}{len(graph(declaration()).nodes):>6}{row}")


if __name__ == "__main__":
    main()
