"""How far off a predicted step may be: the interval in which nine of ten measured steps lie.

Protocol: `interval(seconds, run_class(…))` is that of one prediction. The spreads are those of published runs of one half of
the models; `megaloom validate RUNS` makes their table again, and says how many runs of the other half it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from types import MappingProxyType

from megaloom.planner.contract.devices import Device
from megaloom.planner.contract.workload import Precision

COVERED = 0.9
WIDE, NARROW, EXPERTS, OTHER = "dense, 16 bits, before Blackwell", "dense, fewer bits or Blackwell", "experts", "other"
# Measured over predicted: of ten runs one is outside. Rounded outwards.
SPREADS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {WIDE: (0.92, 1.29), NARROW: (0.89, 1.12), EXPERTS: (0.83, 1.35)}
)


def run_class(sparse: bool, precision: Precision, device: Device) -> str:
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


def narrowest_interval(ratios: Sequence[float]) -> tuple[float, float]:
    """The narrowest interval of as many of these as it takes for the next of their kind to be in it nine times of ten.

    What is far off is nearly always slower than predicted, so that the tails are not alike.
    """
    ordered, held = sorted(ratios), min(len(ratios), ceil(COVERED * (len(ratios) + 1)))
    ends = zip(ordered, ordered[held - 1 :], strict=False)
    return min(ends, key=lambda pair: pair[1] / pair[0])
