"""The 90 % interval of a predicted step time: nine of ten published runs of its class lie within.

`interval(seconds, run_class(…))` gives the interval of one prediction. The table comes from published runs of one half
of the models; `python -m benchmarks.accuracy validate RUNS` makes it again, and counts how many runs of the other half
it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from types import MappingProxyType

from megaloom.planner.contract.devices import Device
from megaloom.planner.contract.workload import Precision

COVERAGE = 0.9
DENSE_WIDE, DENSE_NARROW, EXPERTS, OTHER_CLASS = (
    "dense, 16 bits, before Blackwell",
    "dense, fewer bits or Blackwell",
    "experts",
    "other",
)
# Measured over predicted seconds; one run of ten is outside. Rounded outwards.
SPREADS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {DENSE_WIDE: (0.92, 1.29), DENSE_NARROW: (0.89, 1.12), EXPERTS: (0.83, 1.35)}
)


def run_class(sparse: bool, precision: Precision, device: Device) -> str:
    """Return the class of a run. sparse: the model is a mixture of experts."""
    if device.name not in KNOWN:
        return OTHER_CLASS
    if sparse:
        return EXPERTS
    return DENSE_NARROW if precision.narrow or Precision.MXFP8 in device.flops else DENSE_WIDE


KNOWN = frozenset({"A100", "A800", "H100", "H800", "H200", "B200", "GB200", "B300", "GB300"})


def interval(seconds: float, of: str) -> tuple[float, float]:
    """Return the interval of a predicted step time; for an unknown class the widest one."""
    low, high = SPREADS.get(of) or (min(a for a, _ in SPREADS.values()), max(b for _, b in SPREADS.values()))
    return low * seconds, high * seconds


def narrowest_interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the narrowest interval of these ratios that holds the next one of their class nine times of ten.

    Large errors are nearly always slower than predicted, so the interval is not symmetric.
    """
    ordered, held = sorted(ratios), min(len(ratios), ceil(COVERAGE * (len(ratios) + 1)))
    ends = zip(ordered, ordered[held - 1 :], strict=False)
    return min(ends, key=lambda pair: pair[1] / pair[0])
