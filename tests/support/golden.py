"""Compares the planner's predictions with those recorded in tests/golden/predictions.

Run `python -m tests.support.golden --check` or `--update`; `--quick` takes only the few cases of the test suite.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from math import isclose
from pathlib import Path
from typing import Any

from tests.support.golden_cases import CASES, QUICK, Case

ROOT = Path(__file__).parents[2]
PREDICTIONS = ROOT / "tests" / "golden" / "predictions"
PLANS = PREDICTIONS / "plans.jsonl"
VALIDATION = PREDICTIONS / "validation.jsonl"
TOLERANCE = 1e-9  # relative, of every float
RUNNERS_UP = 9
SHOWN = 10  # differences in a message

# Recorded names on the left, the project's names on the right. Only these tables and the four functions after them
# know the project's names.
LAYOUT = {
    "dp": "dp",
    "tp": "tp",
    "pp": "pp",
    "vpp": "vpp",
    "cp": "cp",
    "ep": "ep",
    "etp": "etp",
    "sequence_parallel": "sequence_parallel",
    "micro_batch_size": "micro_batch",
    "recompute": "recompute",
    "recompute_modules": "recompute_modules",
    "recompute_layers": "recompute_layers",
    "microbatch_group_size": "microbatch_group",
    "distributed_optimizer": "distributed_optimizer",
    "shard": "shard",
    "overlap": "overlaps",
}
OVERLAP = {
    "gradient_reduce": "gradients",
    "parameter_gather": "weights",
    "tensor_parallel": "tensor",
    "expert_parallel": "experts",
}
SECONDS = {
    "forward": "forward",
    "backward": "backward",
    "recompute": "recompute",
    "tensor_parallel_communication": "tensor-parallel communication",
    "context_parallel_communication": "context-parallel communication",
    "expert_parallel_communication": "expert-parallel communication",
    "sharded_weight_communication": "sharded-weight communication",
    "pipeline_communication": "pipeline communication",
    "pipeline_bubble": "pipeline bubble",
    "gradient_communication": "gradient communication",
    "tied_weight_communication": "tied-weight communication",
    "optimizer_step": "optimizer",
}
MEMORY = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer_state": "optimizer",
    "activations": "activations",
    "workspace": "workspace",
    "logits": "logits",
    "allocator_reserve": "allocator",
    "runtime": "runtime",
    "cuda_graphs": "graphs",
}


def search(case: Case) -> dict[str, Any]:
    """Plan a case and return its record; without a plan the record says so."""
    from megaloom.dsl.catalog import find
    from megaloom.dsl.errors import UserError
    from megaloom.dsl.graph import graph
    from megaloom.planner import Precision, Runtime, Workload, cluster, plan
    from megaloom.planner.cost.profiles.frameworks import PROFILES
    from megaloom.planner.partition.whole_blocks import with_cut_points_of
    from megaloom.planner.search.candidates import Candidates
    from megaloom.planner.search.infeasible import checked_fixed
    from megaloom.planner.search.pricing import Pricer

    model, ref = find(case.model)
    machine, runtime = cluster(case.cluster), Runtime(case.runtime)
    workload = Workload(seq=case.seq, batch=case.batch, precision=Precision(case.precision))
    fixed = {LAYOUT[field]: value for field, value in case.fixed.items()}
    if "overlap" in case.fixed:
        fixed["overlaps"] = tuple(OVERLAP[name] for name in case.fixed["overlap"])
    if "distributed_optimizer" in fixed:
        fixed["shard"] = "optimizer" if fixed.pop("distributed_optimizer") else "none"
    pricer = Pricer(with_cut_points_of(graph(model), runtime), machine, workload, PROFILES[runtime])
    legal = Candidates(pricer, checked_fixed(fixed)).count
    try:
        result = plan(model, machine, workload, ref=ref, fixed=fixed, runtime=runtime, fastest=True)
    except UserError:
        return {"legal_layouts": legal, "plan": None}
    return {"legal_layouts": legal, "plan": record(result)}


def record(result: Any) -> dict[str, Any]:
    """Return the result of a search as JSON values under stable names: the fastest plan, and the recommended one."""
    best, predicted, simple = result.best, result.best.predicted, result.recommended
    return {
        "layout": _layout(best.layout),
        "stages": [[stage.start, stage.stop] for stage in best.stages],
        "stage_forward_seconds": [stage.forward_seconds for stage in best.stages],
        "stage_backward_seconds": [stage.backward_seconds for stage in best.stages],
        "stage_parameters": [stage.params for stage in best.stages],
        "step_seconds": predicted.step_seconds,
        "interval_seconds": list(predicted.interval),
        "mfu": predicted.mfu,
        "seconds_by_cause": _renamed(predicted.breakdown, SECONDS),
        "memory_bytes_by_rank": [_renamed(nbytes, MEMORY) for nbytes in predicted.nbytes],
        "recommended": {
            "layout": None if simple is best else _layout(simple.layout),
            "step_seconds": simple.predicted.step_seconds,
        },
        "runners_up": [
            {"layout": _layout(other.layout), "step_seconds": other.predicted.step_seconds}
            for other in result.next(RUNNERS_UP)
        ],
    }


def _layout(layout: Any) -> dict[str, Any]:
    fields = {field: getattr(layout, attribute) for field, attribute in LAYOUT.items()}
    fields["recompute"], fields["shard"] = str(layout.recompute), str(layout.shard)
    fields["recompute_modules"] = [str(module) for module in layout.recompute_modules]
    fields["overlap"] = sorted(_renamed(dict.fromkeys(map(str, layout.overlaps)), OVERLAP))
    return fields


def validation() -> dict[str, dict[str, Any]]:
    """Predict every published run to which constants were fitted and return its record; skipped rows are only named."""
    from benchmarks.accuracy.run_files import fitted_files
    from benchmarks.accuracy.scoring import validate_files

    records: dict[str, dict[str, Any]] = {}
    for path in fitted_files():
        result, stem = validate_files(path), path.stem
        for row in result.rows:
            records[f"{stem}/{row.training_run.id}"] = {
                "step_seconds": row.step_seconds,
                "interval_seconds": list(row.interval),
                "memory_gib": row.memory_gib,
                "memory_gib_upper": row.memory_gib_upper,
                "out_of_memory": row.out_of_memory,
            }
        records |= {f"{stem}/{row.id}": {"skipped": True} for row in result.skipped}
    return records


def _renamed(values: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Return the values under their recorded names. A name that no table has stays as it is."""
    recorded = {theirs: ours for ours, theirs in names.items()}
    return {recorded.get(name, name): value for name, value in values.items()}


def plans(cases: Iterable[Case]) -> dict[str, dict[str, Any]]:
    """Plan these cases and return their records by name."""
    return {case.name: search(case) for case in cases}


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Read the records of a file by name."""
    return dict(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


def write(path: Path, records: dict[str, dict[str, Any]]) -> None:
    """Write records, one line each, sorted by name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(entry, sort_keys=True, separators=(",", ":")) for entry in sorted(records.items())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def updated(before: Any, now: Any) -> Any:
    """Return the values of now, but those of before where the two agree within the tolerance."""
    if isinstance(before, dict) and isinstance(now, dict):
        return {key: updated(before.get(key), value) for key, value in now.items()}
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return [updated(a, b) for a, b in zip(before, now, strict=True)]
    return before if _equal(before, now) else now


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return a line for each value that differs: case, field, value before, value now."""
    lines = []
    for name in sorted({*before, *now}):
        old, new = dict(_values(before.get(name, {}))), dict(_values(now.get(name, {})))
        for field in sorted({*old, *new}):
            a, b = old.get(field, "absent"), new.get(field, "absent")
            if not _equal(a, b):
                lines.append(f"{name}: {field}: {a!r} before, {b!r} now")
    return lines


def report(lines: list[str]) -> str:
    """Return the first differences as text, and how many there are."""
    more = [f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "\n".join([f"{len(lines)} predicted values differ", *lines[:SHOWN], *more])


def _values(record: Any, field: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every single value of a record with its path."""
    if isinstance(record, dict):
        for key, value in record.items():
            yield from _values(value, f"{field}.{key}" if field else key)
    elif isinstance(record, list):
        yield f"{field}.length", len(record)
        for i, value in enumerate(record):
            yield from _values(value, f"{field}[{i}]")
    else:
        yield field, record


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return isclose(a, b, rel_tol=TOLERANCE, abs_tol=0.0)
    return type(a) is type(b) and bool(a == b)


def main() -> int:
    """Run the command line and return its exit status: 1 if a prediction differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.golden", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="compare with the recorded predictions")
    what.add_argument("--update", action="store_true", help="record predictions that differ")
    parser.add_argument("--quick", action="store_true", help="only the few plans of the test suite")
    arguments = parser.parse_args()
    began = time.perf_counter()
    planned = plans(QUICK if arguments.quick else CASES)
    predicted = {} if arguments.quick else validation()
    if arguments.update:
        known = read(PLANS)
        write(PLANS, (known if arguments.quick else {}) | updated(known, planned))
        if not arguments.quick:
            write(VALIDATION, updated(read(VALIDATION), predicted))
        lines = []
    else:
        known = read(PLANS)
        lines = differences(
            {name: known[name] for name in planned if name in known} if arguments.quick else known, planned
        )
        lines += [] if arguments.quick else differences(read(VALIDATION), predicted)
    done = "recorded" if arguments.update else "compared"
    print(f"{done} {len(planned)} plans and {len(predicted)} published rows in {time.perf_counter() - began:.0f} s")
    if lines:
        print(report(lines), file=sys.stderr)
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
