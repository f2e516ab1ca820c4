"""Numbers that divide, and the nearest that would, in words."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import gcd, isqrt


def nearest(value: int, works: Iterable[int]) -> str:
    """The greatest of `works` below `value` and the least above it, in words."""
    below = max((w for w in works if w < value), default=None)
    above = min((w for w in works if w > value), default=None)
    return " or ".join(str(w) for w in (below, above) if w is not None)


@lru_cache(maxsize=1024)
def divisors(*numbers: int) -> tuple[int, ...]:
    """The common divisors of positive numbers, least first."""
    common = gcd(*numbers)
    small = [d for d in range(1, isqrt(common) + 1) if common % d == 0]
    return tuple(sorted({*small, *(common // d for d in small)}))


def multiples(value: int, unit: int) -> str:
    """The multiples of `unit` next to `value`, in words."""
    return nearest(value, [m for m in (value // unit * unit, -(-value // unit) * unit) if m > 0])
