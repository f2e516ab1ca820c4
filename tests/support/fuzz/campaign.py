"""Thousands of damaged and odd inputs, each one call of the command line in a forked child.

    python -m tests.support.fuzz.campaign                    # all cases; goes on where it stopped
    python -m tests.support.fuzz.campaign --only plan 17     # one case again, with its output
    python -m tests.support.fuzz.campaign --kinds plan data  # some kinds
    python -m tests.support.fuzz.campaign --cases 0 --readings 5000  # damaged run files, which are only read

Results are appended to .fuzz/cases.jsonl. A case is determined by its kind and number. It fails if the command shows a
traceback, does not end in time, exits with another code than its label allows, or is refused and leaves files.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from tests.support.fuzz.accepted_damage import silent_acceptances
from tests.support.fuzz.bases import make_bases
from tests.support.fuzz.case import Drawn, Label
from tests.support.fuzz.child import SECONDS, Ended, call, emptied
from tests.support.fuzz.kinds import KINDS
from tests.support.paths import ROOT

PROGRESS = ROOT / ".fuzz"
REFUSED = (1, 2)  # 1: a failed rank or verification, or a read run that breaks a rule
LONGEST_MESSAGE = 4_000
ESCAPES = re.compile(r"[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f-\x9f]")
SLOWER = 3  # times the limit, for a case that is repeated because it was late on a busy machine


def verdict(drawn: Drawn, ended: Ended) -> str:
    """Return what is wrong with the end of a case; an empty text if nothing is."""
    if ended.code is None:
        return "hang"
    if "Traceback (most recent call last)" in ended.text or ended.code not in (0, *REFUSED):
        return f"traceback (code {ended.code})"
    if ended.code and drawn.label is Label.LEGAL:
        return "a legal input is refused"
    if not ended.code and drawn.label is Label.ILLEGAL:
        return "an illegal input is accepted"
    if ended.code == 2 and ended.files:
        return f"a refused command leaves {', '.join(ended.files)[:200]}"
    if ended.code == 2 and (len(ended.text) > LONGEST_MESSAGE or ESCAPES.search(ended.text)):
        return f"a message of {len(ended.text)} characters, or with control characters"
    return ""


def draw(kind: str, number: int, folder: Path, bases: Path) -> Drawn:
    """Write the files of a case into an empty folder, and return its command."""
    return KINDS[kind](Random(f"{kind} {number}"), folder, bases)


def run(kind: str, number: int, bases: Path) -> tuple[Drawn, Ended, str]:
    """Run a case. One that is late is repeated with more time: on a busy machine it may only be slow."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
        for seconds in (SECONDS, SLOWER * SECONDS):
            folder = emptied(Path(place, "case"))
            drawn = draw(kind, number, folder, bases)
            ended = call(drawn.words, folder, seconds)
            if ended.code is not None:
                break
    return drawn, ended, verdict(drawn, ended)


def results() -> list[dict[str, Any]]:
    """Return the results so far."""
    path = PROGRESS / "cases.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def missing(counts: dict[str, int]) -> Iterator[tuple[str, int]]:
    """Yield the cases that have not run, of all kinds in turn."""
    done = {(row["kind"], row["number"]) for row in results()}
    for number in range(max(counts.values())):
        yield from ((kind, number) for kind, n in counts.items() if number < n and (kind, number) not in done)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the counts of each kind, and each failure with the command that repeats it."""
    labels = [label.value for label in Label]
    heads = ["input", "cases", *labels, "succeeded", "refused", "failures"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for kind in (*KINDS, "all"):
        mine = [row for row in rows if kind in (row["kind"], "all")]
        if not mine:
            continue
        label = Counter(row["label"] for row in mine)
        good = [row for row in mine if not row["wrong"]]
        cells = [len(mine), *(label[name] for name in labels), sum(row["code"] == 0 for row in good)]
        cells += [sum(row["code"] != 0 for row in good), len(mine) - len(good)]
        lines.append("| " + " | ".join([kind, *map(str, cells)]) + " |")
    for row in (row for row in rows if row["wrong"]):
        again = f"python -m tests.support.fuzz.campaign --only {row['kind']} {row['number']}"
        lines.append(f"{again}\n    {row['what']}: {row['wrong']}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="number of cases, over all kinds")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--only", nargs=2, metavar=("KIND", "NUMBER"), help="one case, with its output")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--readings", type=int, default=2_000, help="damaged run files that are only read")
    parser.add_argument("--again", action="store_true", help="run the cases again that failed")
    options = parser.parse_args()
    bases = make_bases(PROGRESS / "bases")
    import_everything()
    if options.only:
        kind, number = options.only[0], int(options.only[1])
        drawn, ended, wrong = run(kind, number, bases)
        print(f"{drawn.what} ({drawn.label})\nmegaloom {drawn.words}\n{ended.text[-6000:]}\ncode {ended.code}")
        print(f"files {ended.files}, {ended.seconds:.1f} s: {wrong or 'as it should be'}")
        return bool(wrong)
    path = PROGRESS / "cases.jsonl"
    if options.again:
        kept = [row for row in results() if not row["wrong"]]
        path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    each = -(-options.cases // len(KINDS))
    end = time.monotonic() + options.seconds
    with path.open("a") as file:
        for kind, number in missing(dict.fromkeys(options.kinds, each)):
            if time.monotonic() > end:
                break
            drawn, ended, wrong = run(kind, number, bases)
            row = {"kind": kind, "number": number, "label": drawn.label, "what": drawn.what, "code": ended.code}
            row |= {"seconds": round(ended.seconds, 2), "wrong": wrong}
            file.write(json.dumps(row) + "\n")
            file.flush()
            if wrong:
                print(f"{kind} {number}: {drawn.what}: {wrong}", flush=True)
    rows = results()
    print(table(rows))
    silent, kinds = silent_acceptances(options.readings)
    told = "\n".join([f"{count:6,} {kind}" for kind, count in kinds.most_common()] + silent)
    print(f"{options.readings:,} damaged run files were read, of which {len(silent)} were accepted in silence\n{told}")
    return bool(silent) or any(row["wrong"] for row in rows)


def import_everything() -> None:
    """Import what the commands import, once for all children."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    torch.set_num_threads(1)
    from megaloom.runtime.megatron import device

    device.prepare()
    for package in ("dsl", "planner", "runtime"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(("megaloom", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
            if not name.endswith("__main__"):
                __import__(name)


if __name__ == "__main__":
    sys.exit(main())
