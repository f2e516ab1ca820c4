"""Exported scripts in Megatron-LM itself, beside their plans: `python -m benchmarks.exported_runs write FOLDER`.

    python -m benchmarks.exported_runs write FOLDER [--device H100]
    for s in FOLDER/*.sh; do bash $s > ${s%.sh}.log 2>&1; done   # where Megatron-LM and the GPUs are: MEGATRON=…
    python -m benchmarks.exported_runs read FOLDER --device H100 --libraries "torch 2.11, Transformer Engine 2.12"
    python -m benchmarks.exported_runs report

`write` makes a plan for Megatron-LM of each case, NAME.json, and its export, NAME.sh.
`read` takes step time and memory from each NAME.log, as `plan --from NAME.log` does, and appends a row to
`data/exported_runs.tsv`; a log without iterations is a row with its error. `report` compares all rows with what the
planner of today predicts.
"""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from datetime import date
from pathlib import Path

from benchmarks.gpu_cases import Case, planned
from benchmarks.gpu_report import Measured, append, read, report
from megaloom.planner.cli.export import export
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plan_json import save
from megaloom.planner.contract.workload import Runtime
from megaloom.planner.export.megatron_lm import RELEASE
from megaloom.planner.export.target import Target
from megaloom.planner.runs.iterations import iterations_of, max_allocated, measured_step

GiB = 2**30
RESULTS = Path(__file__).parent / "data" / "exported_runs.tsv"
ORIGIN = "exported_runs"
ERROR = re.compile(r"(\w*(?:Error|Exception): .*|.*error: .*)$")
LONGEST_ERROR = 200  # characters


def _case(model: str, seq: int, batch: int, layout: Layout) -> Case:
    return Case("Megatron-LM", model, seq, batch, layout, runtime=Runtime.MEGATRON)


CASES = {
    "llama8b-1": _case("llama_8b(layers=4)", 8192, 4, Layout(micro_batch=1)),
    "mixtral-1": _case("mixtral_8x7b", 4096, 4, Layout(micro_batch=1)),
    "llama1b-1": _case("llama3-1b", 4096, 16, Layout(micro_batch=4)),
    "qwen3-1": _case("qwen3_30b", 4096, 8, Layout(micro_batch=2)),
    "llama8b-tp2": _case("llama_8b(layers=8)", 8192, 8, Layout(tp=2, sequence_parallel=True, micro_batch=1)),
    "mixtral-ep2": _case("mixtral_8x7b", 4096, 16, Layout(dp=2, ep=2, micro_batch=2, shard="optimizer")),
    "llama1b-dp2": _case("llama3-1b", 4096, 32, Layout(dp=2, micro_batch=4, shard="optimizer")),
    "qwen3-ep2": _case("qwen3_30b", 4096, 32, Layout(dp=2, ep=2, micro_batch=4, shard="optimizer")),
    "llama8b-cp2": _case("llama_8b(layers=8)", 8192, 8, Layout(cp=2, micro_batch=1, shard="optimizer")),
    "llama1b-pp2": _case("llama3-1b", 4096, 32, Layout(pp=2, vpp=2, micro_batch=4)),
}
"""Cases by the names of their files: those of one GPU, then those of two."""


def write(folder: Path, device: str) -> None:
    """Write the plan and the exported script of each case into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        plan = planned(case, device)
        path = folder / f"{name}.json"
        save(plan, path)
        export(str(path), to=Target.MEGATRON_LM, output=path.with_suffix(".sh"))
        held = max(sum(rank.values()) for rank in plan.predicted.nbytes) / GiB
        print(f"{name:<12} {case.name:<50} {plan.predicted.step_seconds:.3f} s, {held:.1f} GiB", flush=True)


def measured(name: str, log: Path, device: str, libraries: str) -> Measured:
    """Return the run of a case as its log has it, or the error that ended it."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    most = max_allocated(lines)
    step = measured_step(iterations_of(lines)[1], most, log.name)
    case = CASES[name]
    run = {"case": case.name, "gpus": f"{case.gpus}x{device}", "libraries": libraries, "origin": ORIGIN}
    run["date"] = date.fromtimestamp(log.stat().st_mtime).isoformat()
    if step is None:
        return Measured(**run, error=_error(lines))
    allocated, reserved = (most.nbytes, most.reserved or 0) if most else (0, 0)
    return Measured(
        **run,
        steps=step.iterations,
        step_seconds=round(step.seconds, 4),
        memory_gib=round(allocated / GiB, 2),
        reserved_gib=round(reserved / GiB, 2),
    )


def _error(lines: list[str]) -> str:
    """Return the last error of a log, without tabs."""
    errors = [found[1] for line in lines if (found := ERROR.search(line))]
    return (errors or lines or ["an empty log"])[-1].replace("\t", " ").strip()[:LONGEST_ERROR]


def main() -> None:
    """Write scripts, read logs, or print the comparison."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["write", "read", "report"])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--device", default="H100")
    parser.add_argument("--libraries", default="", help="with their releases; Megatron-LM's is added")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.action == "report":
        print(report(read(options.output), tuple(CASES.values())))
    elif options.folder is None:
        sys.exit(f"{options.action} needs a folder")
    elif options.action == "write":
        write(options.folder, options.device)
    else:
        libraries = ", ".join(filter(None, (f"Megatron-LM {RELEASE}", options.libraries)))
        for name in CASES:
            if (log := options.folder / f"{name}.log").exists():
                row = measured(name, log, options.device, libraries)
                append(options.output, row)
                print(row.case, row.error or f"{row.step_seconds} s, {row.memory_gib} GiB")


if __name__ == "__main__":
    main()
