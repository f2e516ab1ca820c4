"""How far off a predicted step may be: the interval in which nine of ten measured steps lie.

Protocol: `interval(seconds, kind(…))` is that of one prediction. The spreads are those of published runs of one half of
the models; `megaloom validate RUNS` makes their table again, and says how many runs of the other half it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor
from types import MappingProxyType

from megaloom.planner.layout import Precision
from megaloom.planner.machine.device import Device

COVERED = 0.9
WIDE, NARROW, EXPERTS, OTHER = "dense, 16 bits, before Blackwell", "dense, fewer bits or Blackwell", "experts", "other"
# Measured over predicted: of ten runs one is outside, on either side half of them. Rounded outwards.
SPREADS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {WIDE: (0.91, 1.30), NARROW: (0.89, 1.13), EXPERTS: (0.86, 2.90)}
)


def kind(sparse: bool, precision: Precision, device: Device) -> str:
    """The kind of runs that one is like; `sparse` is a mixture of experts."""
    if device.name not in KNOWN:
        return OTHER
    if sparse:
        return EXPERTS
    return NARROW if precision.narrow or Precision.MXFP8 in device.flops else WIDE


KNOWN = frozenset({"A100", "A800", "H100", "H800", "H200", "B200", "GB200", "B300", "GB300"})


def interval(seconds: float, of: str) -> tuple[float, float]:
    """The least and the most that a step predicted to take so long takes; where nothing is known, the widest."""
    low, high = SPREADS.get(of) or (min(a for a, _ in SPREADS.values()), max(b for _, b in SPREADS.values()))
    return low * seconds, high * seconds


def spread(ratios: Sequence[float]) -> tuple[float, float]:
    """The quantiles between which the next ratio lies with the probability `COVERED`, if it is one of the same kind."""
    ordered, n = sorted(ratios), len(ratios)
    tail = (1 - COVERED) / 2 * (n + 1)
    return ordered[max(0, floor(tail) - 1)], ordered[min(n, ceil(n + 1 - tail)) - 1]
