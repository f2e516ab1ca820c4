"""Count the modules that a plan's search, `Engine.build` and `train` enter: `python benchmarks/entered.py`.

A module is entered when one of its functions, methods or properties is called; imports and methods that attrs writes do
not count. `train` is counted in the process that starts the ranks, `Engine.build` on a rank. For each it prints how
many files and functions it enters, and how many files of each folder. Returns are for a reader who follows the calls
and reads each function once: how often the next function is in a file that was left before. The model is a GPT of one
layer on two CPU processes, with made-up data.

| modules, functions, returns | 74a2605 | 25 November 2026, one table of module kinds |
|---|---|---|
| search | 86, 1051, 351 | 87, 1080, 362 |
| Engine.build | 69, 502, 144 | 66, 454, 145 |
| train, in the starting process | 95, 592, 169 | 97, 607, 175 |
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

import megaloom.dsl
from megaloom.dsl.catalog import find
from megaloom.planner import Plan, Workload, cluster, plan
from megaloom.planner.contract.workload import Precision
from megaloom.runtime import Recipe, train
from megaloom.runtime.launch import launcher

ROOT = Path(megaloom.dsl.__file__).resolve().parents[1]
FOLDERS = ("dsl", "planner", "runtime")
MODEL = "stdlib-gpt"


def entered(call: Callable[[], object]) -> list[tuple[str, str]]:
    """Return file and name of the functions of the project that a call enters, each once, in the order of entering."""
    codes: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            codes[frame.f_code] = None

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    found = dict[tuple[str, str], None]()
    for code in codes:
        with suppress(ValueError):
            path = Path(code.co_filename).resolve().relative_to(ROOT)
            if path.parts[0] in FOLDERS and code.co_name != "<module>":
                found[path.as_posix(), code.co_qualname] = None
    return list(found)


def built(made: Plan) -> list[tuple[str, str]]:
    """On a rank: return what `Engine.build` enters."""
    from megaloom.runtime.engine.engine import Engine  # imports megatron-core, which only ranks need

    model = find(made.model)[0]
    return entered(lambda: Engine.build(made, model, Recipe()))


def text(name: str, found: list[tuple[str, str]]) -> str:
    """Return the counts in a paragraph."""
    files = {file for file, _ in found}
    folders = Counter(Path(file).parent.as_posix() for file in files)
    listed = ", ".join(f"{folder} {count}" for folder, count in sorted(folders.items()))
    returns = sum(1 for _ in groupby(file for file, _ in found)) - len(files)
    return f"{name}: {len(files)} modules, {len(found)} functions, {returns} returns\n  {listed}"


def main() -> None:
    """Print the counts."""
    declared, ref = find(MODEL, {"layers": 1})
    search = partial(plan, declared, cluster("2xCPU"), Workload(seq=64, batch=4, precision=Precision.FP32), ref=ref)
    print(text("search", entered(search)))
    made = search().best
    print(text("Engine.build", launcher.run(built, (made,), made.layout)[0]))
    with TemporaryDirectory() as folder:
        run = partial(train, made, Recipe(steps=1), folder=Path(folder) / "run", source="synthetic")
        print(text("train, in the starting process", entered(run)))


if __name__ == "__main__":
    main()
