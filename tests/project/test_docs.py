"""Documentation is true: code runs, generated sections are up to date, links exist, the README is one page."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from megaloom.dsl import fingerprint
from megaloom.dsl.catalog import find
from tests.support.docs import COMMANDS, _help, pages, written
from tests.support.paths import ROOT

TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMED = [path.relative_to(ROOT).as_posix() for path in TEXTS]
FRAGMENTS = {"@frozen", "def module"}  # blocks copied from examples/, which other tests run
LONGEST = 150  # lines of the README


def blocks(text: str, language: str) -> list[str]:
    """Return the code blocks of a page in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= LONGEST


def test_the_model_in_the_readme_is_llama3_8b(tmp_path: Path) -> None:
    declaration, *_ = blocks((ROOT / "README.md").read_text(), "python")
    (tmp_path / "llama.py").write_text(declaration)
    ours, published = (find(ref)[0] for ref in (str(tmp_path / "llama.py"), "llama3-8b"))
    assert fingerprint(ours) == fingerprint(published)


@pytest.mark.parametrize("page", [page.relative_to(ROOT).as_posix() for page in pages()])
def test_generated_sections_are_up_to_date(page: str) -> None:
    text = (ROOT / page).read_text()
    assert written(ROOT / page) == text, f"{page} is out of date: run python -m tests.support.docs --update"


@pytest.mark.parametrize("page", NAMED)
def test_python_blocks_run(page: str) -> None:
    names: dict[str, object] = {"__name__": "docs"}
    for block in blocks((ROOT / page).read_text(), "python"):
        if not any(block.startswith(start) for start in FRAGMENTS):
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(block, page, "exec"), names)


@pytest.mark.parametrize("page", NAMED)
def test_commands_exist_with_their_options(page: str) -> None:
    for block in blocks((ROOT / page).read_text(), "sh"):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["megaloom"] or words[:1] == ["plan"]:
                command = words[1] if words[0] == "megaloom" else "plan"
                assert command in COMMANDS, line
                for option in (w for w in words if w.startswith("--")):
                    assert re.search(rf"(?<![\w-]){option}(?![\w-])", _help(command)), line


@pytest.mark.parametrize("page", NAMED)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / page).read_text()):
        assert re.match(r"https?:", target) or (ROOT / page).parent.joinpath(target).exists(), f"{page}: {target}"
