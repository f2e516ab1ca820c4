"""Reproduce the findings of independent trials, and print which are mended, refused or left.

    python -m tests.support.findings.table                    # all of them; minutes
    python -m tests.support.findings.table "parity P1" fuzz   # one of them, and all of one trial

The exit code is 1 if a finding that counts as mended or refused is still there.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.findings.finding import FINDINGS, Finding
from tests.support.paths import ROOT

SECONDS = 900  # for one finding
FRAME = ("finding", "table")  # modules of this folder without findings
WIDTH = 100  # of what was seen


def load() -> None:
    """Import all modules with findings."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem not in FRAME:
            importlib.import_module(f"tests.support.findings.{path.stem}")


def order(found: Finding) -> tuple[str, list[int | str]]:
    """Return a key that sorts findings by trial and number."""
    return found.trial, [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", found.number)]


def chosen(names: list[str]) -> list[Finding]:
    """Return the findings of names and of trials; without any, all."""
    return sorted((f for f in FINDINGS.values() if not names or f.name in names or f.trial in names), key=order)


def reproduce(found: Finding) -> tuple[str, str]:
    """Reproduce a finding in a process and a folder of its own. Return the verdict and what was seen."""
    if found.reproduce is None:
        return found.verdict.value, found.why
    command = [sys.executable, "-m", "tests.support.findings.table", "--here", found.name]
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [*command, folder], cwd=ROOT, timeout=SECONDS, text=True, capture_output=True, check=False
            )
        except subprocess.TimeoutExpired:
            return "STILL THERE", f"no end after {SECONDS} s"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    seen = lines[-1].strip() if lines else ""
    return (found.verdict.value, seen) if done.returncode == 0 else ("STILL THERE", "\n".join(lines[-12:]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="trials, or names such as 'parity P1'")
    parser.add_argument("--here", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    load()
    if options.here:
        name, folder = options.here
        reproduction = FINDINGS[name].reproduce
        assert reproduction is not None
        print(reproduction(Path(folder)))
        return 0
    there = 0
    print("| finding | what was wrong | now | seen |\n|---|---|---|---|")
    for found in chosen(options.names):
        verdict, seen = reproduce(found)
        there += verdict == "STILL THERE"
        short = seen if verdict == "STILL THERE" else seen[:WIDTH].replace("|", "/")
        print(f"| {found.name} | {found.text} | {verdict} | {short} |", flush=True)
    return 1 if there else 0


if __name__ == "__main__":
    sys.exit(main())
