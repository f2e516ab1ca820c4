"""The page for people who come from other programs: each feature has a test, and each option exists, there and here."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.coming_from import FILE, SAME, SEEDS, TABLES, Row, State, counts, features, rows
from tests.support.docs import COMMANDS
from tests.support.exported import FLAGS
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "guide" / "coming-from.md"
HELP = ROOT / "docs" / "reference" / "command-line.md"
OPTIONS = ("megatron_layout", "megatron_training")  # tables of options, there and here
BEFORE = [173, 32, 24, 0, 1]  # works, in part, absent, decided, obsolete: what trials found on commit 0f6b4f7
SIZES = {"S0": 37, "S1": 24, "S2": 36, "S3": 27, "S4": 106}
COMMAND = re.compile(r"`(?:megaloom )?(plan|[a-z]+)\b([^`]*)`")


def options(text: str) -> set[str]:
    """Return the options in a text, without their values."""
    return set(re.findall(r"(?<![\w-])--[a-z0-9][a-z0-9-]*", text))


@cache
def known(command: str) -> frozenset[str]:
    """Return the options of a command, from the page of help texts, which another test holds up to date."""
    heading = "## plan" if command == "plan" else f"## megaloom {command}"
    (section,) = re.findall(rf"^{heading}\n(.*?)(?:^## |\Z)", HELP.read_text(), re.DOTALL | re.MULTILINE)
    return frozenset(options(section))


def of_options() -> Iterator[Row]:
    """Return the rows of both tables of options."""
    return (row for row in rows() if row.table in OPTIONS)


@cache
def names_of_tests(path: Path) -> frozenset[str]:
    """Return the names of the tests in a file."""
    nodes = ast.parse(path.read_text()).body if path.is_file() else []
    return frozenset(n.name for n in nodes if isinstance(n, ast.FunctionDef) and n.name.startswith("test_"))


def test_each_feature_of_the_documents_is_in_the_table_once() -> None:
    wanted = [f"{seed}.{i}" for seed, size in SIZES.items() for i in range(1, size + 1)]
    assert sorted(row.seed for row in features()) == sorted(wanted)
    assert counts(row.before for row in features()) == BEFORE
    assert SIZES.keys() == SEEDS.keys()
    assert {row.table for row in rows()} == set(TABLES)
    for row in rows():
        assert (row.seed == "-") == (row.before is None) == (row.now is None), row


def test_rows_with_one_answer_give_it_once() -> None:
    lines = [line.split("\t") for line in FILE.read_text().splitlines()[1:]]
    assert all(x[3] != y[3] for x, y in pairwise(lines) if x[1] == y[1] and y[3] != SAME)
    assert all(x[1] == y[1] for x, y in pairwise(lines) if y[3] == SAME)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_feature_that_works_names_tests_that_exist(seed: str) -> None:
    for row in features():
        if row.seed.startswith(f"{seed}."):
            assert row.tests or row.now not in (State.WORKS, State.PART), f"{row.seed} {row.theirs} names no test"
            for test in row.tests:
                path, _, name = test.partition("::")
                assert name in names_of_tests(ROOT / path), f"{row.seed} {row.theirs}: there is no test {test}"


def test_the_page_counts_what_the_table_has() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| all five")]
    numbers = [[int(n) for n in re.findall(r"(?<=\| )\d+(?= \|)", line)] for line in lines]
    assert numbers == [counts(row.now for row in features()), BEFORE]
    assert sum(numbers[0]) == len(features()) == sum(SIZES.values())


def test_megatron_lm_has_these_options() -> None:
    theirs = options(FLAGS.read_text())
    for row in of_options():
        assert options(row.theirs) and options(row.theirs) <= theirs, row.theirs


def test_we_have_these_options() -> None:
    for row in of_options():
        assert options(row.here) <= known("train"), row.here
    all_options = set[str]().union(*map(known, COMMANDS))
    for row in rows():
        assert options(row.here) <= all_options, row.here
        for command, rest in COMMAND.findall(row.here):
            if command in COMMANDS:
                assert options(rest) <= known(command), row.here
            else:
                assert f"`megaloom {command}" not in row.here, f"there is no command {command}: {row.here}"


def test_the_engine_has_these_names() -> None:
    source = ast.parse((ROOT / "runtime" / "engine" / "engine.py").read_text())
    (engine,) = (node for node in source.body if isinstance(node, ast.ClassDef) and node.name == "Engine")
    names = {node.name for node in engine.body if isinstance(node, ast.FunctionDef)}
    names |= {n.target.id for n in engine.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    for row in rows():
        assert set(re.findall(r"\bengine\.(\w+)", row.here)) <= names, row.here
