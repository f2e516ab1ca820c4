"""How long a model takes to declare, check and fold: `python benchmarks/declare.py [MODEL ...]`, best of five, seconds.

import: `import megaloom.dsl` in a process of its own. declare: the program, its shapes checked as it is written. graph:
its layers, in order and with their weights named. facts: parameters, FLOPs and saved activations of each node, none of
it known beforehand. identity: the fingerprint. DeepSeek-V3 has 10 distinct layers in 372 nodes.
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
from megaloom.dsl.facts import costs as folds
from megaloom.dsl.facts import primitives as programs

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
    """Seconds to import the package in a new process, which loads neither torch nor networkx."""
    return float(subprocess.run([sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True).stdout)


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = perf_counter()
    work()
    return perf_counter() - start


def forget() -> None:
    """Nothing is known of any layer."""
    for cache in (graph, folds._costs, programs.program, programs._made):
        cache.cache_clear()


def fold(m: Model) -> None:
    """All facts of a model."""
    params(m)
    flops(m, batch=1, seq=4096)
    saved(graph(m).nodes, batch=1, seq=4096)


def times(written: Callable[[], Model]) -> tuple[float, ...]:
    """Seconds of each step."""
    made: list[Model] = []
    forget()
    declare = timed(lambda: made.append(written()))
    (m,) = made
    return declare, timed(lambda: graph(m)), timed(lambda: fold(m)), timed(lambda: fingerprint(m))


def main() -> None:
    print(f"import megaloom.dsl  {min(imported() for _ in range(TIMES)):.3f}")
    print(f"{'model':<16}{'nodes':>6}{'declare':>10}{'graph':>10}{'facts':>10}{'identity':>10}{'in all':>10}")
    for ref in sys.argv[1:] or MODELS:
        place, _, name = examples()[ref].partition(":")
        written = getattr(sys.modules[place], name)
        best = tuple(map(min, zip(*(times(written) for _ in range(TIMES)), strict=True)))
        row = "".join(f"{t:>10.3f}" for t in (*best, sum(best)))
        print(f"{ref:<16}{len(graph(written()).nodes):>6}{row}")


if __name__ == "__main__":
    main()
