"""Compare the plan of a model with other layouts, measured on the GPUs at hand: `python -m benchmarks.gpu_regret`.

For each model the layout that the planner recommends is trained, and 13 others: of each thirteenth of the predicted
times between the fastest layout's and 1.3 times that, the layout whose name has the smallest SHA-256. A part without a
layout has none. `gpu_runs` runs them: it appends each result to `--output` before it begins the next, and the same
command goes on where it was cut off. `--keep` adds what was measured to `benchmarks/data/gpu_regret.jsonl`, and
`--report` prints the runs of that file by measured time, with the regret of each model: the measured time of the
recommended layout over the best measured one, minus 1.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from benchmarks.gpu_cases import Case, planned
from benchmarks.gpu_models import reference
from benchmarks.gpu_report import Measured, read
from megaloom.dsl.catalog import find
from megaloom.dsl.graph import graph
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plan_json import layout_to_json
from megaloom.planner.contract.structured import structured
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.search.candidates import Candidates
from megaloom.planner.search.pricing import Pricer
from megaloom.planner.search.search import plan

KEPT = Path(__file__).parent / "data" / "gpu_regret.jsonl"
FIELDS = ("gpus", "libraries", "date", "step_seconds", "memory_gib")  # of a run, as KEPT has them
PARTS, MOST = 13, 1.3
GPUS = 2


@frozen
class Job:
    """A model with the load of a step."""

    family: str
    model: str
    seq: int
    batch: int

    @property
    def workload(self) -> Workload:
        """Return the workload of a step."""
        return Workload(seq=self.seq, batch=self.batch, precision=Precision.BF16)

    def case(self, layout: Layout) -> Case:
        """Return the case of a layout."""
        return Case(self.family, self.model, self.seq, self.batch, layout)


JOBS = (
    Job("Llama 3 8B", "llama_8b(layers=8)", 8192, 8),
    Job("Mixtral", "mixtral_8x7b", 4096, 16),
    Job("Qwen3", "qwen3_30b", 4096, 32),
)


def recommended(job: Job, device: str) -> Layout:
    """Return the layout that `plan` recommends for a job on devices of this name."""
    declared, ref = find(reference(job.model))
    return plan(declared, cluster(f"{GPUS}x{device}"), job.workload, ref=ref).best.layout


def drawn(job: Job, device: str) -> list[Layout]:
    """Return the recommended layout of a job, then one of each part of the predicted times up to MOST."""
    best, parts = recommended(job, device), dict[int, list[Layout]]()
    timed = list(_near(job, device))
    least = min(seconds for _, seconds in timed)
    for layout, seconds in timed:
        part = int((seconds / least - 1) / (MOST - 1) * PARTS)
        if part < PARTS and layout != best:
            parts.setdefault(part, []).append(layout)
    return [best, *(min(parts[part], key=lambda x: job.case(x).digest) for part in sorted(parts))]


def _near(job: Job, device: str) -> Iterator[tuple[Layout, float]]:
    """Yield the layouts of the planner's candidate space that fit the memory limit, with their predicted seconds."""
    pricer = Pricer(graph(find(reference(job.model))[0]), cluster(f"{GPUS}x{device}"), job.workload)
    candidates = Candidates(pricer, {})
    candidates.bound_all()  # which `variants` reads
    layouts = candidates.variants(np.arange(len(candidates.base_layouts))).layouts
    for i in range(len(layouts)):
        partition = pricer.partition(layouts[i])
        if partition.fits:
            yield layouts[i], pricer.simulate(partition).seconds


def kept(runs: Sequence[Measured], device: str) -> Iterator[dict[str, Any]]:
    """Yield what KEPT has of each run that ended without an error."""
    ended = {run.case: run for run in runs if not run.error}
    for job in JOBS:
        for number, layout in enumerate(drawn(job, device)):
            if run := ended.get(job.case(layout).name):
                measured = {name: getattr(run, name) for name in FIELDS}
                yield {"model": job.model, "layout": layout_to_json(layout), "recommended": number == 0, **measured}


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Return the runs of each model by measured time, and the regret of the layout that was recommended."""
    lines = list[str]()
    for job in JOBS:
        some = sorted((row for row in rows if row["model"] == job.model), key=lambda row: row["step_seconds"])
        if not some:
            continue
        lines.append(f"{job.model}, sequence length {job.seq}, batch {job.batch}, {some[0]['gpus']}")
        for row in some:
            case, took = job.case(structured(row["layout"], Layout)), row["step_seconds"]
            predicted = planned(case, row["gpus"].partition("x")[2]).predicted.step_seconds
            off, mark = predicted / took - 1, "  recommended" if row["recommended"] else ""
            lines.append(f"  {took:7.3f} s, predicted {predicted:7.3f} ({off:+.1%})  {case.layout}{mark}")
        chosen = [row["step_seconds"] for row in some if row["recommended"]]
        lines += [f"  regret {seconds / some[0]['step_seconds'] - 1:.1%}" for seconds in chosen]
    return "\n".join(lines)


def options() -> Namespace:
    """Return the options of the command line."""
    parser = ArgumentParser("benchmarks.gpu_regret", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[], metavar="WORD", help="those that have one of these")
    parser.add_argument("--device", default="H200", help="the GPUs, as `plan --gpus` names them")
    parser.add_argument("--output", type=Path, default=Path("gpu_regret.tsv"), help="file of results to append to")
    parser.add_argument("--steps", type=int, default=9, help="steps of a layout, the first four of which do not count")
    parser.add_argument("--timeout", type=float, default=60, help="seconds of a layout")
    parser.add_argument("--limit", type=float, default=450, help="seconds after which no layout begins")
    parser.add_argument("--list", action="store_true", help="print the layouts")
    parser.add_argument("--keep", action="store_true", help=f"add the runs of --output to {KEPT.name}")
    parser.add_argument("--report", action="store_true", help=f"print the runs of {KEPT.name}")
    return parser.parse_args()


def main() -> None:
    asked = options()
    rows = [json.loads(line) for line in KEPT.read_text().splitlines()]
    if asked.keep:
        new = [row for row in kept(read(asked.output), asked.device) if row not in rows]
        rows += new
        with KEPT.open("a", encoding="utf-8") as out:
            out.writelines(f"{json.dumps(row)}\n" for row in new)
    if asked.keep or asked.report:
        print(report(rows))
        return
    jobs = [job for job in JOBS if not asked.models or any(word in job.model for word in asked.models)]
    cases = [job.case(layout) for job in jobs for layout in drawn(job, asked.device)]
    if asked.list:
        print("\n".join(f"{planned(case, asked.device).predicted.step_seconds:7.3f} s  {case.name}" for case in cases))
        return
    from benchmarks.gpu_runs import Budget, run  # imports megatron-core

    run(cases, asked.device, asked.output, Budget(steps=asked.steps, case=asked.timeout, last=asked.limit), again=True)


if __name__ == "__main__":
    main()
