"""The values that the message of a broken rule suggests are legal, for random layouts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import product

from attrs import evolve

from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Workload
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.rules.rules import violations
from tests.support.legality.random_cases import Case, declared, drawn

COUNT, SEED = 2000, 5
SIZES = {"tp-heads", "tp-kv-heads", "tp-width"}  # a tp that suits one must suit all
NAMES = {"micro-batch": "micro_batch", "microbatch-group": "microbatch_group", "sequence": "seq"}
WORDS = r"dp|tp|pp|vpp|cp|ep|etp|batch|micro-batch|microbatch-group|seq|sequence"
NUMBERED = re.compile(rf"(?<![\w-])(?:--)?({WORDS})(?: of)? (\d+)(?: or (\d+))?")
DEVICES = re.compile(r"([\d,]+) devices")


def changes(fix: str) -> Iterator[dict[str, int]]:
    """The changes that a fix names, each as the values that it gives."""
    for part in re.split(r", (?:or )?|(?<=\d), ", re.sub(r"(\d),(\d{3})", r"\1\2", fix)):
        if devices := DEVICES.search(part):
            yield {"count": int(devices[1])}
        matches = [(NAMES.get(name, name), [int(n) for n in numbers if n]) for name, *numbers in NUMBERED.findall(part)]
        for values in product(*(numbers for _, numbers in matches)):
            if values:
                yield dict(zip((name for name, _ in matches), values, strict=True))


def mended(case: Case, change: dict[str, int]) -> tuple[Layout, Workload, Cluster]:
    """The case with these values, dp taking what the axes then leave of as many devices, or of those that are named."""
    workload = {name: value for name, value in change.items() if name in ("batch", "seq")}
    axes = {name: value for name, value in change.items() if name not in (*workload, "count")}
    x, count = evolve(case.layout, **axes), change.get("count", case.layout.world)
    inner = x.tp * x.pp * x.cp
    if {"tp", "pp", "cp", "count"} & {*change} and count % inner == 0:
        x = evolve(x, dp=count // inner)
    world = change.get("count", case.world)
    return x, evolve(case.workload, **workload), evolve(cluster("1xH100"), count=world)


def test_what_is_said_to_work_works() -> None:
    tried: Counter[str] = Counter()
    for case in drawn(COUNT, SEED):
        g, machine = declared(case.decoder), evolve(cluster("1xH100"), count=case.world)
        for wrong in violations(case.layout, g, case.workload, machine):
            for change in changes(wrong.fix):
                tried[wrong.rule] += 1
                layout, work, devices = mended(case, change)
                left = {v.rule for v in violations(layout, g, work, devices)}
                assert not left & (SIZES if wrong.rule in SIZES else {wrong.rule}), (case, wrong, change)
    assert {"world", "expert-grid", "tp-heads", "tp-kv-heads", "batch", "seq", "microbatch-group", "stages"} <= {*tried}
