"""Train the same models by megaloom and by other programs: `python -m benchmarks.against_others [CASE ...]`.

Megaloom runs with torch's layers (`ours`), with Transformer Engine (`ours-te`) and in fp8 (`ours-fp8`). Other programs
are a loop of megatron-core alone, with Transformer Engine's layers (`te`, in fp8 `te-fp8`) and with torch's (`torch`),
and plain PyTorch with FSDP2 and compiled blocks (`plain`; dense models under data parallelism). As many programs of a
case as `--together` says are started at once, and take turns on the devices, three times. The table has the median of
the turns, its ratio to `ours`, the most memory that torch allocated on a GPU, and the seconds from the command to the
end of the first step, beside the others' starts. If a program has no result, its line says why. Every result is
appended at once to the file of `--results`, and what is there is not measured again, so that a run that was cut off
goes on. CASE is a letter; by default all of as many GPUs as are there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from threading import Timer
from typing import Any

import torch
from attrs import evolve, frozen

from benchmarks.opponents.task import MARK, ROUNDS, Task
from benchmarks.opponents.turns import Turns

HEAD = "case program    step ms   ratio     GiB start s"
GRACE = 10  # seconds for a program to end after a request
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
    "ours-fp8": ("own_run", "te-fp8"),
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
    return not program.endswith("fp8") or not task.experts


def command(program: str, task: Task) -> list[str]:
    """Return the command line of a program."""
    module, *more = PROGRAMS[program]
    many = (
        ("torch.distributed.run", "--standalone", "--nproc-per-node", str(task.world), "-m")
        if module != "own_run"
        else ()
    )
    return [sys.executable, "-m", *many, f"benchmarks.opponents.{module}", task.text, *more]


def run(programs: Sequence[str], task: Task, seconds: float) -> list[dict[str, Any]]:
    """Start programs together and give them turns. Return for each what it printed, and `start_s`; or `error`.

    start_s: seconds from its command to the end of its first step. seconds: limit on all of them.
    """
    with tempfile.TemporaryDirectory(prefix="against-others-") as folder:
        started = [Started.of(program, task, Path(folder)) for program in programs]
        timer = Timer(seconds, lambda: [one.stop() for one in started])
        timer.start()
        for one in started:
            one.turns.await_ready(one.alive)
        for turn in range(ROUNDS):
            for one in started:
                one.turns.give(turn, one.alive)
        results = [one.result() for one in started]
        timer.cancel()
    return results


@frozen
class Started:
    """A program that was started. Its output goes into files of the folder of its turns."""

    process: subprocess.Popen[bytes]
    turns: Turns
    begun: float  # time.time()

    @classmethod
    def of(cls, program: str, task: Task, folder: Path) -> Started:
        """Start a program."""
        turns, begun = Turns(folder, program), time.time()
        environment = {**os.environ, **turns.environment}
        with turns.file("stdout").open("w") as out, turns.file("stderr").open("w") as err:
            process = subprocess.Popen(command(program, task), env=environment, stdout=out, stderr=err)
        return cls(process, turns, begun)

    def alive(self) -> bool:
        """Return whether the program has not ended."""
        return self.process.poll() is None

    def stop(self) -> None:
        """End a program that takes too long; torchrun ends its ranks when it is asked to end."""
        if self.alive():
            self.turns.file("late").touch()
            self.process.terminate()
            Timer(GRACE, self.process.kill).start()

    def result(self) -> dict[str, Any]:
        """Wait for the end of the program, and return its result or its error."""
        code = self.process.wait()
        if self.turns.file("late").exists():
            return {"error": "not finished within the limit of --seconds"}
        out, err = (self.turns.file(kind).read_text().strip() for kind in ("stdout", "stderr"))
        lines = [line for line in out.splitlines() if line.startswith(MARK)]
        if code or not lines:
            return {"error": last_error(err) or f"exit code {code}"}
        found = json.loads(lines[0].removeprefix(MARK))
        return {**found, "start_s": found["first_step_at"] - self.begun}


def last_error(text: str) -> str:
    """Return the line of the last exception in the output of a program, without torchrun's own; or the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"(Error|Exception):? ", line) and "ChildFailedError" not in line]
    return (errors or lines or [""])[-1]


def row(case: str, program: str, one: dict[str, Any], ours: dict[str, Any]) -> str:
    """Return the line of a program: its median step, that as a multiple of megaloom's, memory and start."""
    if "error" in one:
        return f"{case:<5}{program:<9}{one['error']}"
    step = median(one["step_ms"])
    ratio = step / median(ours["step_ms"]) if "error" not in ours else float("nan")
    return f"{case:<5}{program:<9}{step:>9.1f}{ratio:>8.3f}{one['gib']:>8.2f}{one['start_s']:>8.1f}"


def report(case: str, known: Mapping[tuple[str, str], dict[str, Any]]) -> str:
    """Return the lines of a case: one for each program that has run, and one if they trained different models."""
    found = {program: one for (of, program), one in known.items() if of == case}
    ours = found.get("ours", {"error": "not measured"})
    lines = [row(case, program, found[program], ours) for program in PROGRAMS if program in found]
    sizes = sorted({one["parameters"] for one in found.values() if "error" not in one})
    if len(sizes) > 1:
        lines.append(f"{case:<5}not the same model: {', '.join(map(str, sizes))} parameters")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the same models by megaloom and by other programs.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)}; by default all that fit")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--results", type=Path, default=Path("against_others.jsonl"))
    parser.add_argument("--together", type=int, default=2, help="programs in the devices' memory at once")
    parser.add_argument("--report", action="store_true", help="print what the file of results has, and run nothing")
    parser.add_argument("--seconds", type=float, default=240, help="limit on the programs that run together")
    options = parser.parse_args()
    if unknown := [case for case in options.cases if case not in CASES]:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    results = [json.loads(line) for line in lines]
    if options.report:
        for device in dict.fromkeys(one["device"] for one in results):
            known = {(one["case"], one["program"]): one for one in results if one["device"] == device}
            print(f"{device}\n{HEAD}")
            for case in dict.fromkeys(case for case, _ in known):
                print(report(case, known))
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    count = max(1, torch.cuda.device_count())
    chosen = options.cases or [case for case, task in CASES.items() if task.world == count]
    known = {(one["case"], one["program"]): one for one in results if one["device"] == device}
    print(f"{device}\n{HEAD}", flush=True)
    for case in chosen:
        programs = [program for program in options.programs if can_run(program, CASES[case])]
        missing = [program for program in programs if (case, program) not in known]
        for first in range(0, len(missing), options.together):
            some = missing[first : first + options.together]
            for program, one in zip(some, run(some, CASES[case], options.seconds), strict=True):
                known[case, program] = {"case": case, "program": program, "device": device, **one}
                with options.results.open("a") as file:
                    file.write(json.dumps(known[case, program]) + "\n")
        print(report(case, known), flush=True)


if __name__ == "__main__":
    main()
