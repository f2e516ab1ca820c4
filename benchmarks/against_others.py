"""Train the same models by megaloom and by other programs: `python -m benchmarks.against_others [CASE ...]`.

Other programs are a loop of megatron-core alone, with Transformer Engine's layers (`te`, in fp8 `te-fp8`) and with
torch's (`torch`), and plain PyTorch with FSDP2 and compiled blocks (`plain`; dense models under data parallelism). The
programs of a case take turns, three times. The table has the median step of each and its ratio to megaloom's, the most
memory that torch allocated on a GPU, and the seconds from the command to the end of the first step. If a program has no
result, its line says why. Every result is appended at once to the file of `--results`, and what is there is not
measured again, so that a run that was cut off goes on. CASE is a letter; by default all of as many GPUs as are there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from attrs import asdict, evolve

from benchmarks.opponents.task import MARK, Result, Task

ROUNDS = 3
LLAMA = Task(
    layers=4, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=32000, seq=8192, batch=4, micro_batch=1
)  # Llama 3 8B's layers
LARGER = evolve(LLAMA, layers=8, vocab=128256, batch=8)
MIXTRAL = Task(
    *(2, 4096, 14336, 32, 8, 32000), seq=4096, batch=4, micro_batch=1, experts=8, top_k=2
)  # Mixtral 8x7B's layers
QWEN = Task(
    *(4, 2048, 768, 32, 4, 151936), seq=4096, batch=8, micro_batch=2, experts=128, top_k=8, qk_norm=True
)  # Qwen3 30B A3B's layers
CASES = {
    "A": LLAMA,
    "B": Task(layers=24, hidden=2048, ffn=5632, heads=16, kv_heads=16, vocab=51200, seq=2048, batch=16, micro_batch=4),
    "C1": MIXTRAL,
    "C2": evolve(MIXTRAL, micro_batch=2, batch=8),
    "D2": QWEN,
    "D1": evolve(QWEN, micro_batch=1),
    "E": evolve(LARGER, tp=2),
    "F": evolve(LARGER, cp=2),
    "G": evolve(MIXTRAL, dp=2, ep=2, micro_batch=2, batch=16),
    "H8": evolve(QWEN, dp=2, ep=2, micro_batch=8, batch=32),
    "H16": evolve(QWEN, cp=2, ep=2, micro_batch=16, batch=32),
    "I": evolve(LARGER, dp=2, micro_batch=2, batch=16),
}
"""The cases, by the letter of the table in docs/accuracy and, where a letter has several, the micro-batch."""

PROGRAMS = {
    "ours": ("own_run", "torch"),
    "ours-te": ("own_run", "te"),
    "te": ("megatron_loop", "te"),
    "te-fp8": ("megatron_loop", "te-fp8"),
    "torch": ("megatron_loop", "torch"),
    "plain": ("plain_loop",),
}
"""Modules of benchmarks/opponents with their second argument, by the name of the program."""


def can_run(program: str, task: Task) -> bool:
    """Return whether a program trains such a model under such a layout."""
    if program == "plain":
        return task.world == task.dp and not task.experts
    return program != "te-fp8" or not task.experts


def command(program: str, task: Task) -> list[str]:
    """Return the command line of a program."""
    module, *more = PROGRAMS[program]
    many = ("torch.distributed.run", "--nproc-per-node", str(task.world), "-m") if module != "own_run" else ()
    return [sys.executable, "-m", *many, f"benchmarks.opponents.{module}", task.text, *more]


def run(program: str, task: Task, seconds: float) -> dict[str, Any]:
    """Return what a program printed, and `start_s`, the seconds to the end of its first step; or `error`."""
    begun = time.time()
    try:
        ended = subprocess.run(command(program, task), capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"not finished after {seconds:g} s"}
    lines = [line for line in ended.stdout.splitlines() if line.startswith(MARK)]
    if ended.returncode or not lines:
        return {"error": (ended.stderr.strip() or f"exit code {ended.returncode}").splitlines()[-1]}
    result = Result(**json.loads(lines[0].removeprefix(MARK)))
    return {**asdict(result), "start_s": result.first_step_at - begun}


def row(case: str, program: str, measured: list[dict[str, Any]], ours: list[dict[str, Any]]) -> str:
    """Return the line of a program: its median step, that as a multiple of megaloom's, memory and start."""
    good = [one for one in measured if "error" not in one]
    if not good:
        return f"{case:<5}{program:<9}{measured[0]['error']}"
    step, start, gib = (median(one[name] for one in good) for name in ("step_ms", "start_s", "gib"))
    ratio = step / median(one["step_ms"] for one in ours) if ours else float("nan")
    return f"{case:<5}{program:<9}{step:>9.1f}{ratio:>8.3f}{gib:>8.2f}{start:>8.1f}  {len(good)}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the same models by megaloom and by other programs.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)}; by default all that fit")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--results", type=Path, default=Path("against_others.jsonl"))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=100, help="limit on one program")
    options = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    if unknown := [case for case in options.cases if case not in CASES]:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    count = max(1, torch.cuda.device_count())
    chosen = options.cases or [case for case, task in CASES.items() if task.world == count]
    known: dict[tuple[str, str], list[dict[str, Any]]] = {}
    if options.results.exists():
        for line in options.results.read_text().splitlines():
            one = json.loads(line)
            if one["device"] == device:
                known.setdefault((one["case"], one["program"]), []).append(one)
    print(f"{device}\ncase program    step ms   ratio     GiB start s runs", flush=True)
    for case in chosen:
        programs = [program for program in options.programs if can_run(program, CASES[case])]
        for turn in range(options.rounds):
            for program in programs:
                before = known.setdefault((case, program), [])
                if len(before) > turn or any("error" in one for one in before):
                    continue
                one = run(program, CASES[case], options.seconds)
                before.append({"case": case, "program": program, "device": device, **one})
                with options.results.open("a") as file:
                    file.write(json.dumps(before[-1]) + "\n")
        ours = [one for one in known.get((case, "ours"), []) if "error" not in one]
        for program in programs:
            print(row(case, program, known[case, program], ours), flush=True)
        sizes = {one["parameters"] for program in programs for one in known[case, program] if "error" not in one}
        if len(sizes) > 1:
            print(f"{case:<5}not the same model: {', '.join(map(str, sorted(sizes)))} parameters", flush=True)


if __name__ == "__main__":
    main()
