"""The workflow that publishes a release, and the pages that name its versions."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from tests.project.test_packaging import PYPROJECT
from tests.support.limits import LIMIT
from tests.support.paths import ROOT

VERSION = PYPROJECT["project"]["version"]
JOBS: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]


def shell(script: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a step's script as GitHub does, with this Python first on the path."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "-e", "-c", script]
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, "PATH": path, **env}, capture_output=True, text=True, timeout=LIMIT
    )


def script(job: str, name: str) -> str:
    """Return the script of a named step."""
    return str(next(step["run"] for step in JOBS[job]["steps"] if step.get("name", "").startswith(name)))


def test_publishing_waits_for_all_other_jobs_and_alone_may_ask_for_a_token() -> None:
    assert set(JOBS["publish"]["needs"]) == JOBS.keys() - {"publish"}
    assert [name for name, job in JOBS.items() if "id-token" in job.get("permissions", {})] == ["publish"]


@pytest.mark.parametrize(
    ("tag", "message"),
    [(f"v{VERSION}", ""), ("v0.0.0", f"the tag is v0.0.0, but pyproject.toml has version {VERSION}\n")],
)
def test_only_the_tag_of_the_version_is_built(tag: str, message: str) -> None:
    done = shell(script("build", "The tag"), ROOT, GITHUB_REF_NAME=tag)
    assert (done.returncode != 0, done.stdout) == (bool(message), message), done.stderr


def test_the_changes_of_this_version_follow_those_that_are_not_released() -> None:
    headings = re.findall("^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", VERSION]


def test_the_page_of_versions_has_the_pinned_and_the_least_versions() -> None:
    page = (ROOT / "docs/versions.md").read_text()
    lines = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    on_3_11 = [r for r in lines if r.marker is None or r.marker.evaluate({"python_version": "3.11"})]
    pinned = {r.name: str(r.specifier).removeprefix("==") for r in on_3_11}
    (row,) = [line for line in page.splitlines() if "`constraints.txt`" in line]
    named = dict(re.findall(r"(numpy|torch|megatron-core|transformers|datasets) ([\d.]+\d)", row))
    assert named == {name: pinned[name] for name in ("numpy", "torch", "megatron-core", "transformers", "datasets")}
    (row,) = [line for line in page.splitlines() if "least versions:" in line]
    for name, least in (requirement.split(">=") for requirement in PYPROJECT["project"]["dependencies"]):
        assert re.search(rf"{name} {re.escape(least)}(\.0)*[,|\s]", row), (name, least)
