"""Divisors and multiples of numbers, and the nearest of them in words."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import gcd, isqrt


def nearest(value: int, allowed: Iterable[int]) -> str:
    """Return the largest allowed number below `value` and the smallest above it, in words: `4 or 8`."""
    below = max((n for n in allowed if n < value), default=None)
    above = min((n for n in allowed if n > value), default=None)
    return " or ".join(str(n) for n in (below, above) if n is not None)


@lru_cache(maxsize=1024)
def divisors(*numbers: int) -> tuple[int, ...]:
    """Return the common divisors of positive numbers in ascending order."""
    common = gcd(*numbers)
    small = [d for d in range(1, isqrt(common) + 1) if common % d == 0]
    return tuple(sorted({*small, *(common // d for d in small)}))


def multiples(value: int, unit: int) -> str:
    """Return the multiples of `unit` next to `value`, in words."""
    return nearest(value, [m for m in (value // unit * unit, -(-value // unit) * unit) if m > 0])
