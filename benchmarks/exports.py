"""Start each export of each model in the target's own argument code: `python -m benchmarks.exports TARGET=FOLDER …`.

    python -m benchmarks.exports megatron-lm=~/Megatron-LM torchtitan=~/torchtitan accelerate=installed
    python -m benchmarks.exports megatron-bridge=~/Megatron-Bridge,~/py312/bin/python

TARGET is a program, FOLDER its source at a release that the export is for, then the Python that has its packages, if
that is another one; `installed` takes the package of this Python. For every model of the catalogue that the target can
express, the best plan for 64 H100, or 1,024, is exported and read by a starter (see `starters`), which runs the own
checks of the target, up to where it would train. The table has how many started, and why others were refused. The
exit code is 1 if any was refused.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from attrs import frozen

from megaloom.dsl.catalog import examples, find
from megaloom.dsl.errors import UserError
from megaloom.dsl.facts.parameters import params
from megaloom.dsl.graph import Model, graph
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Precision, Runtime, Workload
from megaloom.planner.export.decoder import read_decoder
from megaloom.planner.export.export import cut_for, export_plan
from megaloom.planner.export.target import TORCHTITANS, Target
from megaloom.planner.export.torchtitan_flavors import find_flavor
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.search.search import plan

STARTERS = Path(__file__).parent / "starters"
TOKENS = 4096  # of a sequence, where a model has no learned positions
CLUSTERS = ("64xH100", "1024xH100")  # the second for models that do not fit the first
LIMIT = 1800  # seconds for all exports of a target
FAKE_TORCHRUN = '#!/bin/bash\nprintf "%s\\0" "$@" > "$WORDS"\nenv -0 > "$WORDS.env"\n'


@frozen
class Judged:
    """A target: its starter, the end of its files' names, and what plans for it fix, tried in order."""

    starter: str
    suffix: str
    runtime: Runtime
    fixed: tuple[Mapping[str, Any], ...] = ({},)


_SHARDED = {"shard": "weights", "overlaps": ("gradients", "weights"), "recompute": "none", "vocab_multiple": 1}
_ALONE = {"tp": 1, "pp": 1, "vpp": 1, "cp": 1, "ep": 1, "etp": 1}
JUDGED = {
    Target.MEGATRON_LM: Judged("megatron_arguments", ".sh", Runtime.MEGATRON),
    Target.MEGATRON_BRIDGE: Judged("bridge_config", ".py", Runtime.MEGATRON),
    Target.TORCHTITAN: Judged(
        "torchtitan_config",
        ".toml",
        Runtime.MEGALOOM,
        (
            {**_SHARDED, "pp": 1, "vpp": 1},
            {**_SHARDED, "pp": 1, "vpp": 1, "recompute": "full"},
            {**_SHARDED, "pp": 4, "vpp": 1, "reshard": "step", "recompute": "full"},
        ),
    ),
    Target.TORCHTITAN_0_3: Judged(
        "torchtitan_python",
        ".py",
        Runtime.MEGALOOM,
        (
            {**_SHARDED, "cp": 1, "pp": 1, "vpp": 1},
            {**_SHARDED, "cp": 1, "pp": 1, "vpp": 1, "recompute": "full"},
            {**_SHARDED, "cp": 1, "pp": 4, "vpp": 1, "reshard": "step", "recompute": "full"},
        ),
    ),
    Target.ACCELERATE: Judged(
        "accelerate_launch",
        ".yaml",
        Runtime.MEGATRON,
        ({"vpp": 1, "recompute": "none", "shard": "optimizer"}, {**_SHARDED, **_ALONE}),
    ),
}


def plans(target: Target) -> Iterator[tuple[str, Plan, Model]]:
    """Yield the plan of each model that a target can express, and its model; of several attempts, the first."""
    for name in examples():
        model, ref = find(name)
        try:
            read = read_decoder(graph(model), target if target in TORCHTITANS else Target.MEGATRON_LM)
        except UserError:
            continue
        if target in TORCHTITANS and find_flavor(read, target) is None:
            continue  # which no plan changes
        positions = read.positions
        work = Workload(seq=positions or TOKENS, batch=512, precision=Precision.BF16)
        for fixed in JUDGED[target].fixed:
            found = best_plan(ref, work, tuple(fixed.items()), JUDGED[target].runtime)
            made = found and exportable(found, model, target)
            if made:
                yield name, made, model
                break


def exportable(found: Plan, model: Model, target: Target) -> Plan | None:
    """Return the plan with the stages that a target needs; None if the target cannot express it."""
    try:
        made = cut_for(target, found, model)
        export_plan(made, model, target)
    except UserError:
        return None
    return made


@cache
def best_plan(ref: str, work: Workload, fixed: tuple[tuple[str, Any], ...], runtime: Runtime) -> Plan | None:
    """Return the plan of a search on the smallest of the clusters that it fits; targets with equal choices share it."""
    for gpus in CLUSTERS:
        try:
            return plan(find(ref)[0], cluster(gpus), work, ref=ref, fixed=dict(fixed), runtime=runtime).best
        except UserError:
            continue
    return None


def write_exports(target: Target, folder: Path) -> list[Path]:
    """Write the exports of a target into a folder, each with the facts that its launcher sets; return their paths."""
    paths = []
    for name, made, model in plans(target):
        path = folder / f"{name.replace('.', '-')}{JUDGED[target].suffix}"
        path.write_text(export_plan(made, model, target), encoding="utf-8")
        facts: dict[str, Any] = {
            "processes": made.cluster.count,
            "words": [],
            "environment": {},
            "parameters": params(model),
        }
        if target is Target.MEGATRON_LM:
            facts |= launched(path, folder)
        path.with_suffix(".facts").write_text(json.dumps(facts))
        print(f"  {name}: {made.layout}", flush=True)
        paths.append(path)
    return paths


def launched(script: Path, folder: Path) -> dict[str, Any]:
    """Run a shell script with a torchrun that writes what it is given; return its words and environment."""
    (folder / "bin").mkdir(exist_ok=True)
    torchrun, words = folder / "bin" / "torchrun", script.with_suffix(".words")
    torchrun.write_text(FAKE_TORCHRUN)
    torchrun.chmod(0o755)
    known = {"PATH": f"{torchrun.parent}:{os.environ['PATH']}", "WORDS": str(words)}
    subprocess.run(["bash", str(script)], env=known, check=True)
    pairs = (line.partition("=") for line in words.with_name(f"{words.name}.env").read_text().split("\0") if line)
    return {"words": words.read_text().split("\0")[:-1], "environment": {key: value for key, _, value in pairs}}


def verdicts(target: Target, folder: str, python: str, exports: Sequence[Path]) -> dict[str, tuple[str, str]]:
    """Start exports in the target's code; return for each file whether it started, and why not."""
    starter = STARTERS / f"{JUDGED[target].starter}.py"
    command = [python, "-W", "ignore", str(starter), folder, *map(str, exports)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    lines = [line.split("\t") for line in done.stdout.splitlines() if line.startswith("VERDICT\t")]
    if len(lines) < len(exports):
        sys.stderr.write(done.stderr[-2000:])
    return {file: (verdict, why) for _, file, verdict, why in lines}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+", metavar="TARGET=FOLDER[,PYTHON]")
    options = parser.parse_args()
    refused = 0
    for one in options.targets:
        name, _, given = one.partition("=")
        source, _, python = given.partition(",")
        target = Target(name)
        source = source if source == "installed" else str(Path(source).expanduser().resolve())
        print(f"{target.program} at {source}", flush=True)
        with tempfile.TemporaryDirectory() as made:
            exports = write_exports(target, Path(made))
            found = verdicts(target, source, os.path.expanduser(python) or sys.executable, exports)
        for path in exports:
            verdict, why = found.get(path.name, ("refused", "the starter ended before it"))
            refused += verdict != "started"
            print(f"{verdict:8} {path.stem}" + (f"\n         {why}" if why else ""))
        started = sum(verdict == "started" for verdict, _ in found.values())
        print(f"{target.program}: {started} of {len(exports)} started\n", flush=True)
    return int(refused > 0)


if __name__ == "__main__":
    sys.exit(main())
