"""The tables of docs/accuracy.

A table stands between `<!-- table NAME -->` and `<!-- end of NAME -->`; the text around it is written by hand. Scores
come from the published runs in `data`, constants from the presets of devices and the framework profiles, runs on our
own GPUs from benchmarks/data/gpu_runs.tsv.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import mean, median
from typing import Any

from attrs import fields

from megaloom.planner.contract.devices import Device, Link
from megaloom.planner.cost.measured_memory import TENSORS_HIGH
from megaloom.planner.cost.profiles.figures import Figure
from megaloom.planner.cost.profiles.frameworks import MEGATRON, OWN
from megaloom.planner.cost.profiles.groups import GROUPS, Feature, profile_figures
from megaloom.planner.hardware.presets import DEVICE_FIGURES, LINK_FIGURES, OTHER_SOURCES, PRESETS, HardwareFigure

from .coverage import in_fitting_half
from .features import FEATURES
from .frameworks import OTHER_KERNELS, PUBLISHED
from .pair_order import pair_classes
from .published_devices import PUBLISHED_DEVICES
from .records import RunRecord
from .run_files import DATA, OTHER_RUNS, fitted_files, shipped_records
from .scoreboard import TableBy, markdown, markdown_table, percent, summaries
from .scoring import Predicted, Validation, p90, validate_files
from .sharded_halves import in_fitted_half

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "accuracy"
GPU_RUNS = ROOT / "benchmarks" / "data" / "gpu_runs.tsv"
SECTION = re.compile(r"(<!-- table ([\w-]+) -->\n)(.*?)(<!-- end of \2 -->)", re.DOTALL)
LARGEST = 30  # residuals in the table
LARGE_GIB = 20  # from which on a run is one of large memory
SUMMARY = ("class of runs", "runs", "median error", "mean error", "90 % of errors below", "bias", "inside the interval")


@cache
def fitted() -> Validation:
    """Return the scores of the data from which some constants were fitted."""
    return validate_files(*fitted_files())


@cache
def classes() -> Validation:
    """Return the scores of the runs from which the intervals of the classes were fitted."""
    return validate_files(DATA / "published_runs.jsonl")


@cache
def other() -> Validation:
    """Return the scores of the data that no constant was fitted to."""
    return validate_files(DATA / f"{OTHER_RUNS}.jsonl")


def summary() -> str:
    """Return step-time errors by class of runs, five rows."""
    return markdown_table(SUMMARY, summaries(classes().rows, TableBy.KIND, checking=False))


def order_of_pairs() -> str:
    """Return the share of pairs of layouts in the measured order, by their predicted difference."""
    rows = []
    for one in pair_classes((*fitted().rows, *other().rows)):
        difference = f"{one.above:.0%} to {one.limit:.0%}" if one.limit < inf else f"more than {one.above:.0%}"
        rows.append((difference, str(one.pairs), percent(one.right / one.pairs)))
    return markdown_table(("predicted difference", "pairs", "in the measured order"), rows)


def largest_residuals() -> str:
    """Return the runs with the largest errors of the step time, one of each layout and model."""
    seen: set[tuple[object, ...]] = set()
    rows: list[Sequence[str]] = []
    timed = [p for p in (*fitted().rows, *other().rows) if p.time_error is not None]
    for p in sorted(timed, key=lambda p: -abs(p.time_error or 0.0)):
        key = p.training_run.source, p.training_run.name, p.training_run.gpu, p.training_run.workload.precision
        if key in seen:
            continue
        seen.add(key)
        run = p.training_run
        error, seconds = f"{p.time_error:+.0%}", f"{run.step_seconds:.3g}"
        world, precision = f"{run.layout.world} {run.gpu}", str(run.workload.precision)
        rows.append((run.id, run.name, world, precision, f"`{run.layout}`", seconds, f"{p.step_seconds:.3g}", error))
    head = ("run", "model", "devices", "precision", "layout", "measured s", "predicted s", "error")
    return markdown_table(head, rows[:LARGEST])


def residuals_by_framework() -> str:
    """Return step-time errors by framework profile."""
    groups: dict[str, list[Predicted]] = defaultdict(list)
    for p in (*fitted().rows, *other().rows):
        if p.time_error is not None:
            groups[p.training_run.profile.name].append(p)
    rows = []
    for name, runs in sorted(groups.items()):
        errors = [p.time_error or 0.0 for p in runs]
        off = [abs(e) for e in errors]
        rows.append((name, str(len(runs)), f"{median(off):.1%}", f"{mean(off):.1%}", f"{mean(errors):+.1%}"))
    return markdown_table(("framework profile", "runs", "median error", "mean error", "bias"), rows)


def sharded_runs() -> str:
    """Return step-time errors of the runs that shard weights or gradients, of the fitted half and of the other."""
    halves: dict[str, dict[bool, list[Predicted]]] = defaultdict(lambda: {True: [], False: []})
    for p in classes().rows:
        if p.training_run.layout.fsdp and p.time_error is not None:
            for name in (p.training_run.source, "all"):
                halves[name][in_fitted_half(p.training_run.id)].append(p)
    rows = [
        [name, *_half(halves[name][True]), *_half(halves[name][False])]
        for name in (*sorted({*halves} - {"all"}), "all")
    ]
    score = ("runs", "median", "90 %", "bias")
    return markdown_table(
        ("source", *(f"{name} (fitted)" for name in score), *(f"{s} (kept back)" for s in score)), rows
    )


def _half(rows: Sequence[Predicted]) -> list[str]:
    if not rows:
        return ["0", "", "", ""]
    errors = [p.time_error or 0.0 for p in rows]
    sizes = [abs(error) for error in errors]
    return [str(len(rows)), *map(percent, (median(sizes), p90(sizes), mean(errors)))]


def memory_rows() -> list[tuple[Predicted, float]]:
    """Return the runs of Megatron's family that allocated at least 1 GiB, with measured over predicted bytes."""
    rows = (p for p in (*fitted().rows, *other().rows) if p.training_run.profile.name not in OTHER_KERNELS)
    return [
        (p, p.training_run.memory_gib / p.memory_gib)
        for p in rows
        if p.training_run.memory_kind == "allocated" and (p.training_run.memory_gib or 0.0) >= 1.0
        if p.training_run.memory_gib is not None
    ]


def memory_high() -> str:
    """Return the upper ends of memory by class and size: on the models that they were taken from, and on the others."""
    rows = []
    for sparse, small in ((False, True), (False, False), (True, True), (True, False)):
        halves: dict[bool, list[float]] = {True: [], False: []}
        for p, ratio in memory_rows():
            run = p.training_run
            if run.sparse is sparse and ((run.memory_gib or 0.0) < LARGE_GIB) is small:
                halves[in_fitting_half(p)].append(ratio)
        cells = []
        for ratios in halves.values():
            below = [ratio <= TENSORS_HIGH[sparse] for ratio in ratios]
            shown = (f"{median(ratios):.3f}", f"{mean(below):.1%}") if ratios else ("", "")
            cells += [str(len(ratios)), *shown]
        size = f"1 to {LARGE_GIB} GiB" if small else f"from {LARGE_GIB} GiB"
        rows.append(["experts" if sparse else "dense", size, f"{TENSORS_HIGH[sparse]:.2f}", *cells])
    score = ("runs", "median", "below")
    halved = (*(f"{name} (fitted)" for name in score), *(f"{name} (check)" for name in score))
    return markdown_table(("class", "memory", "upper end", *halved), rows)


def overflow_chances() -> str:
    """Return the runs of Megatron's family by the chance that memory does not suffice, and how many ran out."""
    rows = [p for p in (*fitted().rows, *other().rows) if p.training_run.profile.name not in OTHER_KERNELS]
    out = []
    for low, high in pairwise((0.0, 0.01, 0.1, 0.5, 0.9, 1.01)):
        mine = [p.training_run.oom for p in rows if low <= p.overflow < high]
        out.append((f"{low:.0%} to {min(high, 1.0):.0%}", str(len(mine)), str(sum(mine))))
    return markdown_table(("predicted chance", "runs", "ran out of memory"), out)


def published_devices() -> str:
    """Return the figures in which devices of published runs differ from their presets."""
    rows = [
        (
            name,
            device.preset,
            f"`{field}`",
            _number(figure.value),
            DEVICE_FIGURES[field].unit,
            figure.kind,
            figure.source,
        )
        for name, device in PUBLISHED_DEVICES.items()
        for field, figure in device.figures.items()
    ]
    return markdown_table(("device", "preset", "figure", "value", "unit", "kind", "source"), rows)


def gpu_runs() -> str:
    """Return steps and memory that our runtime was measured to take on our own GPUs."""
    with GPU_RUNS.open(encoding="utf-8") as file:
        measured = list(csv.DictReader(file, delimiter="\t"))
    head = ("GPUs", "model", "sequence", "batch", "layout", "step s", "predicted s", "error", "GiB", "predicted GiB")
    rows = []
    for row in measured:
        error = float(row["predicted_step_seconds"]) / float(row["step_seconds"]) - 1
        before = [row[key] for key in ("gpus", "model", "sequence_length", "global_batch", "layout")]
        times = [row["step_seconds"], row["predicted_step_seconds"], f"{error:+.1%}"]
        rows.append([*before, *times, row["memory_gib"], row["predicted_memory_gib"]])
    return markdown_table(head, rows)


def device_table() -> str:
    """Return the figures of every device preset."""
    return _hardware_table(DEVICE_FIGURES, {name: preset.device for name, preset in PRESETS.items()})


def link_table() -> str:
    """Return the figures of every link of the presets."""
    every = [link for preset in PRESETS.values() for link in (preset.intra, preset.inter)]
    links = {f"{link.name}, {link.bandwidth / 1e9:g} GB/s": link for link in every}
    return _hardware_table(LINK_FIGURES, links)


def _hardware_table(figures: Mapping[str, HardwareFigure], items: Mapping[str, Device | Link]) -> str:
    """Return a table with a row for each figure and a column for each device or link."""
    kind = type(next(iter(items.values())))
    if missing := {f.name for f in fields(kind)} - {"name", *figures}:
        raise ValueError(f"{kind.__name__}: no unit and source for {', '.join(sorted(missing))}")
    rows = [
        (f"`{name}`", it.unit, str(it.kind), it.source, *(_number(getattr(item, name)) for item in items.values()))
        for name, it in figures.items()
    ]
    notes = [f"\n{item.name}: {source}." for item in items.values() if (source := OTHER_SOURCES.get(item.name))]
    return "\n".join((markdown_table(("figure", "unit", "kind", "source", *items), rows), *notes))


def profile_table() -> str:
    """Return every value of the profiles with which plans are made."""
    rows = [_figure_row("megaloom", figure) for figure in profile_figures(OWN)]
    rows += [_figure_row("megatron", figure) for figure in profile_figures(MEGATRON)]
    return markdown_table(("profile", "setting", "meaning", "value", "unit", "kind", "source"), rows)


def _figure_row(profile: str, figure: Any) -> Sequence[str]:
    name = f"`{figure.group}.{figure.setting}`"
    value, kind = _number(figure.value), str(figure.kind)
    return profile, name, figure.meaning, value, figure.unit, kind, figure.source or "the default"


def feature_table() -> str:
    """Return every figure of every feature."""
    rows = [row for feature in FEATURES.values() for row in _feature_rows(feature)]
    return markdown_table(("feature", "setting", "value", "kind", "source"), rows)


def _feature_rows(feature: Feature) -> Iterator[Sequence[str]]:
    for group in GROUPS:
        for setting, change in getattr(feature, group).items():
            changes: Mapping[str, Figure] = {"": change} if isinstance(change, Figure) else change
            for name, figure in changes.items():
                path = f"`{group}.{setting} {name}".strip() + "`"
                yield feature.name, path, _number(figure.value), str(figure.kind), figure.source


def framework_table() -> str:
    """Return the features of the profiles of published runs, and how many runs use each profile."""
    records = [record for record in shipped_records().values() if isinstance(record, RunRecord)]
    rows = []
    for name, profile in PUBLISHED.items():
        runs = [record for record in records if record.profile == name]
        extra = sorted({feature for record in runs for feature in record.features})
        base = ", ".join(feature.name for feature in profile.features)
        rows.append((name, base, ", ".join(extra), str(len(runs))))
    return markdown_table(("profile", "features", "further features of some runs", "runs"), rows)


def _number(value: Any) -> str:
    """Return a value in few characters."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_number(one)}" for name, one in value.items()) or "1"
    if isinstance(value, tuple):
        return ", ".join(map(_number, value)) or "none"
    if isinstance(value, bool) or value is None or isinstance(value, str):
        words: Mapping[object, str] = {True: "yes", False: "no", None: "none"}
        return words.get(value, str(value))
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"


TABLES: Mapping[str, Callable[[], str]] = {
    "summary": summary,
    "classes": lambda: markdown(classes(), TableBy.KIND),
    "other-sources": lambda: markdown(other(), TableBy.SOURCE),
    "pairs": order_of_pairs,
    "groups": lambda: markdown(fitted(), TableBy.GROUP),
    "largest": largest_residuals,
    "frameworks": residuals_by_framework,
    "sharded": sharded_runs,
    "memory-high": memory_high,
    "overflow": overflow_chances,
    "gpu-runs": gpu_runs,
    "devices": device_table,
    "published-devices": published_devices,
    "links": link_table,
    "profiles": profile_table,
    "features": feature_table,
    "published-profiles": framework_table,
}


def written(text: str) -> str:
    """Return the text of a page with its tables as they should be now."""
    return SECTION.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[4]}", text)


def pages() -> Iterable[Path]:
    """Return the pages of docs/accuracy."""
    return sorted(PAGES.glob("*.md"))


def update_pages(names: Sequence[str], *, check: bool) -> int:
    """Write the pages that are out of date, or only list them; then the exit status is 1 if there are any."""
    outdated = []
    for page in (page for page in pages() if not names or page.stem in names):
        text = page.read_text(encoding="utf-8")
        new = summary() + "\n" if page.stem == "summary" else written(text)
        if new == text:
            continue
        outdated.append(page)
        if not check:
            page.write_text(new, encoding="utf-8")
    for page in outdated:
        print(f"{'out of date' if check else 'updated'}: {page.relative_to(ROOT)}")
    return int(bool(outdated) and check)
