"""Calibrate a device and its links by measurements.

A `Sample` is one measured time and `predicted_seconds` the cost model's time for it. `fitted_figures` returns the
fields of device and links with which the cost model reproduces the samples, `profile_text` the cluster file with them,
`calibration_table` the comparison with the preset.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import exp, log
from statistics import median
from typing import Any

import numpy as np
from attrs import asdict, evolve, frozen
from rich.table import Table
from rich.text import Text

from megaloom.dsl.facts.work import Work
from megaloom.dsl.work_kinds import WorkKind
from megaloom.planner.contract.devices import Cluster, Link
from megaloom.planner.contract.workload import Precision
from megaloom.planner.cost import communication, kernels
from megaloom.planner.cost.communication import PASSES, ProcessGroup
from megaloom.planner.cost.profiles.frameworks import OWN

from .cluster_file import CLUSTER_FILE_VERSION

COLLECTIVE_KINDS = tuple(PASSES)
SMALL_MESSAGE = 1 << 16  # bytes: below, a message costs its latency
MAX_NBYTES = 1 << 60  # of a message: more than any link passes in a measurement
LARGE_FACTOR = 16  # samples with at least 1/16 of the largest amount of work are large
SIGNIFICANT_DIGITS = 3


@frozen(kw_only=True)
class Sample:
    """The time of one operation on the slowest device. `nbytes` of a collective is the size that the facts count."""

    kind: str  # product, attention, copy, launch, send, or a collective
    seconds: float
    precision: str = ""
    shape: tuple[int, ...] = ()  # of a product m, n, k; of attention heads, tokens, channels
    nbytes: int = 0
    devices: int = 1  # per group; all groups communicate at once
    stride: int = 1  # rank distance of neighbours in a group

    @property
    def work(self) -> Work:
        """The matrix product or causal attention as the facts count it."""
        if self.kind == "product":
            m, n, k = self.shape
            return _work(WorkKind.PRODUCT, 2 * m * n * k, m * k + k * n + m * n, 1, m, n, k)
        heads, tokens, channels = self.shape
        flops = 2 * heads * tokens * tokens * channels  # two products, half of each
        return _work(WorkKind.ATTENTION, flops, 4 * heads * tokens * channels, heads, tokens, tokens, channels)

    @property
    def amount(self) -> float:
        """The FLOPs (for attention, forward and backward) or the bytes that pass a link in this time."""
        if self.kind == "product":
            return self.work.flops
        if self.kind == "attention":
            return (1 + kernels.ATTEND_BACKWARD) * self.work.flops
        return (
            PASSES.get(self.kind, 1) * self.nbytes * ((self.devices - 1) / self.devices if self.kind in PASSES else 1)
        )


def _work(kind: WorkKind, flops: int, elements: int, count: int, m: int, n: int, k: int) -> Work:
    return Work(kind=kind, path="", flops=flops, dgrad=0, wgrad=0, elements=elements, count=count, m=m, n=n, k=k)


def predicted_seconds(sample: Sample, cluster: Cluster) -> float:
    """Return the cost model's seconds for a sample, at the clock of a short burst."""
    device = cluster.device
    match sample.kind:
        case "product" | "attention":
            precision = Precision(sample.precision)
            seconds = kernels.kernel_seconds(sample.work, evolve(device, sustained=1.0), precision)
            if sample.kind == "attention":
                return seconds.forward + seconds.backward
            m, _, k = sample.shape  # a narrow one of operands that are cast already
            cast = OWN.narrow.cast_moved_nbytes * m * k / device.moves if precision.narrow else 0.0
            return seconds.forward - cast
        case "copy":
            return sample.nbytes / device.moves
        case "launch":
            return device.launch_seconds
        case "send":
            link = cluster.intra if sample.stride < cluster.per_node else cluster.inter
            return link.latency + sample.nbytes / link.reached
    group = ProcessGroup(sample.devices, sample.stride)
    return communication.collective_seconds(sample.kind, cluster, (sample.nbytes, group))


def fitted_figures(samples: Sequence[Sample], cluster: Cluster, *, known: bool) -> dict[str, dict[str, Any]]:
    """Return the fields of the device and its links with which the cost model reproduces the samples.

    known: the peaks are the datasheet's, so only efficiencies are fitted. An efficiency is the preset's, times the
    predicted seconds over the measured ones.
    """
    device = cluster.device
    out: dict[str, Any] = {"bandwidth_efficiency": _share(_copied(samples) / device.bandwidth)}
    ratios = {p: _speed_ratio(samples, "product", cluster, p) for p in device.flops}
    measured = {p: times for p, times in ratios.items() if times}
    if not known:  # what was reached is the peak
        out["flops"] = {p: _rounded(device.flops[p] * device.flops_efficiency * x) for p, x in measured.items()}
        out["flops_efficiency"] = 1.0
    elif wide := measured.get(Precision.BF16, measured.get(Precision.FP16)):
        out["flops_efficiency"] = _share(device.flops_efficiency * wide)
        if narrow := measured.get(Precision.FP8):
            out["narrow_efficiency"] = _share(device.narrow_efficiency * narrow / wide)
    for precision in (Precision.BF16, Precision.FP16, Precision.FP32):
        if times := _speed_ratio(samples, "attention", cluster, precision):
            peak = out["flops"][precision] / device.flops[precision] if not known else 1.0
            out["attend_efficiency"] = _share(device.attend_efficiency * times / peak)
            break
    out["launch_seconds"] = _rounded(next(s.seconds for s in samples if s.kind == "launch"))
    parts = {"device": out, "intra": _links(samples, cluster, "intra", known)}
    if cluster.nodes > 1:
        parts["inter"] = _links(samples, cluster, "inter", known)
    elif cluster.inter == cluster.intra:  # as between processes
        parts["inter"] = parts["intra"]
    if not known:  # what a link passes is read from memory
        fastest = (fields["bandwidth"] for name, fields in parts.items() if name != "device" and fields)
        out |= {"bandwidth": max([_rounded(_copied(samples)), *fastest]), "bandwidth_efficiency": 1.0}
    return {name: fields for name, fields in parts.items() if fields}


def _copied(samples: Iterable[Sample]) -> float:
    return max(s.nbytes / s.seconds for s in samples if s.kind == "copy")


def _speed_ratio(samples: Iterable[Sample], kind: str, cluster: Cluster, precision: str) -> float:
    """Return the median of predicted over measured seconds of the large samples; 0 if there are none."""
    matching = [s for s in samples if (s.kind, s.precision) == (kind, precision)]
    large = [s for s in matching if LARGE_FACTOR * s.amount >= max(x.amount for x in matching)]
    return median(predicted_seconds(s, cluster) / s.seconds for s in large) if large else 0.0


def _link(sample: Sample) -> bool:
    return sample.kind == "send" or sample.kind in PASSES


def _links(samples: Sequence[Sample], cluster: Cluster, part: str, known: bool) -> dict[str, Any]:
    """Return latency and hop fitted to small messages, and the bandwidth reached by large ones.

    The cost model is linear in latency and hop, so its seconds at one second of each are their coefficients.
    """
    mine = [s for s in samples if _link(s) and (s.stride < cluster.per_node) is (part == "intra")]
    small, large = ([s for s in mine if (s.nbytes <= SMALL_MESSAGE) is few] for few in (True, False))
    if not small or not large:
        return {}
    link: Link = getattr(cluster, part)

    def with_delays(latency: float, hop: float) -> Cluster:
        like = evolve(link, latency=latency, hop=hop)
        return evolve(cluster, intra=like) if part == "intra" else evolve(cluster, inter=like)

    no_delay, one_latency, one_hop = (
        [predicted_seconds(evolve(s, nbytes=1), machine) for s in small]
        for machine in (with_delays(0.0, 0.0), with_delays(1.0, 0.0), with_delays(0.0, 1.0))
    )
    counts = [(a - t, b - t) for t, a, b in zip(no_delay, one_latency, one_hop, strict=True)]
    latency, hop = _latency_and_hop(counts, [s.seconds for s in small])
    delayed = with_delays(latency, hop)
    rates = [link.reached * s.nbytes / _bytes_in_time(s, delayed) for s in large]
    reached = exp(sum(map(log, rates)) / len(rates))
    top = max(reached, link.bandwidth if known else max(rates))
    return {
        "latency": _rounded(latency),
        "hop": _rounded(hop),
        "bandwidth": _rounded(top),
        "efficiency": _share(reached / top),
    }


def _bytes_in_time(sample: Sample, cluster: Cluster) -> int:
    """Return the size of a message that would take the sample's time on this cluster, by bisection.

    At least half of the measured time is taken to pass bytes, though the latency of small messages may be longer.
    """
    waited = predicted_seconds(evolve(sample, nbytes=1), cluster)
    limit = waited + max(sample.seconds / 2, sample.seconds - waited)
    sizes = range(1, MAX_NBYTES)
    return 1 + bisect_left(sizes, limit, key=lambda nbytes: predicted_seconds(evolve(sample, nbytes=nbytes), cluster))


def _latency_and_hop(counts: Sequence[tuple[float, float]], seconds: Sequence[float]) -> tuple[float, float]:
    """Return (latency, hop) with the least relative squared error, neither below zero."""
    t = np.array(seconds)
    rows = np.array(counts) / t[:, None]
    latency, hop = np.linalg.lstsq(rows, np.ones(len(t)), rcond=None)[0].tolist()
    if min(latency, hop) >= 0:
        return float(latency), float(hop)
    column = rows[:, 0 if hop < 0 else 1]
    only = float(column.sum() / (column**2).sum())
    return (only, 0.0) if hop < 0 else (0.0, only)


def _share(value: float) -> float:
    return min(1.0, _rounded(value))


def _rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def profile_text(
    samples: Sequence[Sample], fields: Mapping[str, Any], base: str, name: str, count: int, report: Mapping[str, Any]
) -> str:
    """Return a cluster file as JSON: the fitted fields, the samples, and `report` on how they were measured."""
    head = {
        "version": CLUSTER_FILE_VERSION,
        "base": base,
        **({"name": name} if name != base else {}),
        "count": count,
        **fields,
    }
    rows = [{k: v for k, v in asdict(s).items() if v not in ("", ()) and (k, v) != ("nbytes", 0)} for s in samples]
    return json.dumps({**head, **report, "measured": rows}, indent=1) + "\n"


def calibration_table(samples: Sequence[Sample], preset: Cluster, profile: Cluster) -> Table:
    """Return a table with one row per sample: the measurement, and the predictions of preset and profile."""
    out = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for head in ("", "of", "devices", "measured", "", "preset", "off", "profile", "off"):
        out.add_column(Text(head), justify="left" if head in ("", "of") else "right")
    for sample in samples:
        rate, unit = _shown(sample)
        cells = [sample.kind.replace("_", "-"), _of(sample), str(sample.devices), f"{rate(sample.seconds):.4g}", unit]
        for machine in (preset, profile):
            predicted = predicted_seconds(sample, machine)
            cells += [f"{rate(predicted):.4g}", f"{predicted / sample.seconds - 1:+.0%}"]
        out.add_row(*map(Text, cells))
    return out


def _shown(sample: Sample) -> tuple[Callable[[float], float], str]:
    """Return a function from seconds to the shown value, and its unit: microseconds, or a rate."""
    if sample.kind == "launch" or (_link(sample) and sample.nbytes <= SMALL_MESSAGE):
        return lambda seconds: 1e6 * seconds, "us"
    flops = sample.kind in ("product", "attention")
    scale, unit = (1e12, "TFLOP/s") if flops and sample.amount / sample.seconds >= 1e12 else (1e9, "GFLOP/s")
    return lambda seconds: sample.amount / seconds / scale, unit if flops else "GB/s"


def _of(sample: Sample) -> str:
    names = {"product": ("", "", ""), "attention": (" heads", " tokens", " channels")}.get(sample.kind, ())
    shape = " x ".join(f"{n}{name}" for n, name in zip(sample.shape, names, strict=True))
    return f"{sample.precision} {shape}" if shape else next(_size(sample.nbytes), "")


def _size(nbytes: int) -> Iterator[str]:
    for size, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= size:
            yield f"{nbytes / size:.4g} {name}"
