"""The table of what other systems have, docs/guide/coming-from.tsv, and the sections of the page that are made of it.

Columns: `seed`, a feature of one of the five documents in SEEDS, or "-" for a translation that is no feature of them;
`table`, the table of the page; `theirs`, in their words; `here`, in ours, or `"` for that of the row above; `before`,
the state that trials found on commit 0f6b4f7; `now`, the state today; `test`, the tests that hold it, or "-".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from enum import StrEnum
from functools import cache
from itertools import groupby

from attrs import frozen

from tests.support.paths import ROOT

FILE = ROOT / "docs" / "guide" / "coming-from.tsv"
COLUMNS = ("seed", "table", "theirs", "here", "before", "now", "test")
NONE, SAME = "-", '"'
SEEDS = {
    "S0": "NeMo's MegatronStrategy and MegatronParallel",
    "S1": "BioNeMo's guide to parallelism",
    "S2": "NeMo Megatron's models, training and evaluation",
    "S3": "megatron-core's distributed package",
    "S4": "Accelerate's Megatron-LM plugin",
}
TABLES = {  # of the page, by the heading of their first column
    "megatron_layout": "Megatron-LM",
    "megatron_training": "Megatron-LM",
    "megatron_programs": "program or module of Megatron-LM",
    "megatron_core": "megatron-core",
    "nemo_strategy": "NeMo",
    "nemo_models": "NeMo 1 and 2, Megatron-Bridge",
    "nemo_parallelism": "guide to parallelism",
    "accelerate_configuration": "Accelerate",
    "accelerate_scripts": "Accelerate",
    "accelerate_conversion": "Accelerate",
    "torchtitan_parallelism": "torchtitan 0.2.2",
}


class State(StrEnum):
    """The state of a feature here: `part` lacks something, `decided` has another form, and the row says which."""

    WORKS = "works"
    PART = "part"
    ABSENT = "absent"
    DECIDED = "decided"
    OBSOLETE = "obsolete"

    @property
    def shown(self) -> str:
        """Return the state in the words of the page."""
        words = {State.PART: "in part", State.ABSENT: "not here", State.DECIDED: "another way"}
        return words.get(self, self.value)


@frozen
class Row:
    """One row: what they call it, and what it is here. before and now: None for a translation that is no feature."""

    seed: str
    table: str
    theirs: str
    here: str
    before: State | None
    now: State | None
    tests: tuple[str, ...]


@cache
def rows() -> tuple[Row, ...]:
    """Return all rows of the table, each with its own answer."""
    names, *lines = (line.split("\t") for line in FILE.read_text().splitlines())
    assert tuple(names) == COLUMNS, names
    out: list[Row] = []
    for line in lines:
        seed, table, theirs, here, before, now, tests = line
        out.append(
            Row(
                seed,
                table,
                theirs,
                out[-1].here if here == SAME else here,
                None if before == NONE else State(before),
                None if now == NONE else State(now),
                () if tests == NONE else tuple(tests.split(" ")),
            )
        )
    return tuple(out)


def features() -> tuple[Row, ...]:
    """Return the rows that are features of one of the five documents."""
    return tuple(row for row in rows() if row.now is not None)


def counts(states: Iterable[State | None]) -> list[int]:
    """Return how many states are works, part, absent, decided and obsolete."""
    found = Counter(states)
    return [found[state] for state in State]


def _table(name: str) -> str:
    """Return a table of the page: what works, and translations; neighbours with one answer are one row."""
    lines = [f"| {TABLES[name]} | Megaloom |", "|---|---|"]
    chosen = [row for row in rows() if row.table == name and row.now in (None, State.WORKS)]
    lines += [f"| {_joined(group)} | {here} |" for here, group in groupby(chosen, lambda row: row.here)]
    return "\n".join(lines)


def _joined(group: Iterable[Row]) -> str:
    """Return the words of rows in one cell: separated by commas, or by semicolons where one has commas itself."""
    words = [row.theirs for row in group]
    return ("; " if any(", " in re.sub(r"`[^`]*`", "", word) for word in words) else ", ").join(words)


def _lacking() -> str:
    """Return the table of what does not work, or not as there: rows with one answer and state are one row."""
    lines = ["| there | here | why, and what instead |", "|---|---|---|"]
    for state in (State.PART, State.ABSENT, State.DECIDED, State.OBSOLETE):
        chosen = [row for row in features() if row.now is state]
        for here in dict.fromkeys(row.here for row in chosen):
            lines.append(f"| {_joined(r for r in chosen if r.here == here)} | {state.shown} | {here} |")
    return "\n".join(lines)


def _counts() -> str:
    """Return how many features of each document are in which state, and how many of all were so before."""
    lines = [f"| features of | {' | '.join(state.shown for state in State)} |", "|---|" + "---|" * len(State)]
    of_seeds = {title: [r.now for r in features() if r.seed.startswith(f"{seed}.")] for seed, title in SEEDS.items()}
    of_all = {
        "all five": [r.now for r in features()],
        "all five, before (commit 0f6b4f7)": [r.before for r in features()],
    }
    lines += [f"| {title} | {' | '.join(map(str, counts(found)))} |" for title, found in {**of_seeds, **of_all}.items()]
    return "\n".join(lines)


def sections() -> dict[str, Callable[[], str]]:
    """Return the generated sections of the page by their names."""
    tables: dict[str, Callable[[], str]] = {name: lambda name=name: _table(name) for name in TABLES}  # type: ignore[misc]
    return tables | {"coming_from_lacking": _lacking, "coming_from_counts": _counts}
