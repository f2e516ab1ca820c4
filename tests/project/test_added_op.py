"""The files of an op: those of the gated delta rule, which CONTRIBUTING shows, are four new ones and few edited."""

from __future__ import annotations

from tests.support.paths import ROOT

NAMES = ("DeltaRule", "GatedDeltaNet", "delta_rule", "delta_net")
ADDED = {
    "dsl/ops/delta_rule.py",
    "dsl/layers/delta_net.py",
    "runtime/ops/delta_rule.py",
    "examples/qwen3_next.py",
}
EDITED = {"dsl/__init__.py", "runtime/ops/__init__.py"}  # the exports of the dsl, and the list of families


def test_only_its_own_files_and_lists_name_an_op() -> None:
    sources = (p for top in ("dsl", "planner", "runtime", "examples") for p in (ROOT / top).rglob("*.py"))
    named = {p.relative_to(ROOT).as_posix() for p in sources if any(name in p.read_text() for name in NAMES)}
    assert named == ADDED | EDITED
