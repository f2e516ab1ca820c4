"""Durations, timeouts and ages are measured by clocks that nobody sets: a clock that jumps breaks nothing."""

import re

from tests.support.paths import ROOT

SETTABLE = re.compile(r"\btime\.time\(|\bfrom time import [^\n]*\btime\b|\.now\(|\.today\(|st_mtime\b(?!_ns)|getmtime")
REASONS = {
    "runtime/metrics/display.py": "names a clock that has moved",
    "runtime/cli/profile.py": "the date in a file of measurements",
}


def test_settable_clocks_are_read_for_a_reason() -> None:
    """st_mtime_ns is compared for equality only: a file with another one is another file."""
    files = [path for folder in ("dsl", "planner", "runtime") for path in (ROOT / folder).rglob("*.py")]
    found = {path.relative_to(ROOT).as_posix() for path in files if SETTABLE.search(path.read_text())}
    assert found == REASONS.keys()
