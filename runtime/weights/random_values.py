"""Random tensors of which any part is made alone: element i is a function of a key and i. Any device makes equal bits.

The generator is Philox-4x32-10, which is counter-based (Salmon et al., Parallel random numbers: as easy as 1, 2, 3,
SC 2011): word i % 4 of the block of counter i // 4 belongs to element i. A word selects a quantile of the normal
distribution from a table, by linear interpolation. Each operation is on integers, or one addition, multiplication,
division or square root as IEEE 754 defines it, so no processor rounds otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, reduce
from hashlib import sha256
from itertools import product
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from .views import Box

Words = TypeVar("Words", np.ndarray, Tensor)  # of type int32

LOW_BITS = 2**32 - 1
ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85

AT_ONCE = {"cpu": 2**18, "cuda": 2**24}
"""Elements that are made at once: they fit the cache of a processor, and fill a GPU. Each takes about 25 bytes."""

MANTISSA_BITS = 8  # that select an entry of the table, beside the exponent
DROPPED_BITS = 23 - MANTISSA_BITS


@frozen
class RandomKey:
    """Two words of the generator's key and the upper two of its counter: they select a random tensor."""

    key: tuple[int, int]
    upper: tuple[int, int]

    @classmethod
    def of(cls, text: str) -> RandomKey:
        """Return the key of a text, of which another text has another one."""
        k0, k1, c2, c3 = np.frombuffer(sha256(text.encode()).digest()[:16], "<u4").tolist()
        return cls((k0, k1), (c2, c3))


def normal_values(key: RandomKey, sizes: tuple[int, ...], box: Box, device: torch.device) -> Tensor:
    """Return a box of a tensor [sizes] of standard normal float32 values."""
    return _box(key, sizes, box, device, uniform=False)


def uniform_values(key: RandomKey, sizes: tuple[int, ...], box: Box, device: torch.device) -> Tensor:
    """Return a box of a tensor [sizes] of float32 values, uniform between -1 and 1."""
    return _box(key, sizes, box, device, uniform=True)


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Return the four words of each counter, of four words, as signed integers. Words of shape [1] are broadcast."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _product(x0, MULTIPLIERS[0])
        high1, low1 = _product(x2, MULTIPLIERS[1])
        x0, x1, x2, x3 = high1 ^ x1, low1, high0 ^ x3, low0
        x0 ^= signed(k0)
        x2 ^= signed(k1)
        k0, k1 = (k0 + KEY_STEPS[0]) & LOW_BITS, (k1 + KEY_STEPS[1]) & LOW_BITS
    return x0, x1, x2, x3


def signed(word: int) -> int:
    """Return the signed integer of 32 bits that has the bits of an unsigned one."""
    return word - 2**32 if word >> 31 else word


def _product(x: Words, factor: int) -> tuple[Words, Words]:
    """Return the upper and the lower word of the products of unsigned words."""
    if isinstance(x, np.ndarray):
        words: Any = (x.view(np.uint32) * np.uint64(factor)).view(np.int32)
    else:
        words = (x.view(torch.uint32).to(torch.int64) * factor).view(torch.int32)
    return words[1::2], words[::2]


def _box(key: RandomKey, sizes: tuple[int, ...], box: Box, device: torch.device, *, uniform: bool) -> Tensor:
    starts, length = _runs(sizes, box)
    out = torch.empty(len(starts), length, device=device)
    for rows, columns in _pieces(len(starts), length, AT_ONCE[device.type]):
        words = _words(key, starts[rows] + columns.start, columns.stop - columns.start, device)
        out[rows, columns] = _uniform(words) if uniform else _normal(words)
    return out.view([len(r) for r in box])


def _runs(sizes: tuple[int, ...], box: Box) -> tuple[Tensor, int]:
    """Return the flat indices at which the contiguous parts of a box begin, and their length."""
    whole = [len(r) == n for r, n in zip(box, sizes, strict=True)]
    inner = next((i for i in range(len(sizes)) if all(whole[i + 1 :])), 0)
    strides = [prod(sizes[i + 1 :]) for i in range(len(sizes))]
    starts = torch.tensor([box[inner].start * strides[inner]] if sizes else [0])
    for r, stride in zip(box[:inner], strides, strict=False):
        starts = (starts[:, None] + torch.arange(r.start, r.stop) * stride).flatten()
    return starts, prod(map(len, box[inner:]))


def _pieces(rows: int, columns: int, elements: int) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and columns of the pieces of a matrix, of at most so many elements each."""
    width = max(1, min(columns, elements))
    height = max(1, elements // width)
    for row, column in product(range(0, rows, height), range(0, columns, width)):
        yield slice(row, min(row + height, rows)), slice(column, min(column + width, columns))


def _words(key: RandomKey, starts: Tensor, count: int, device: torch.device) -> Tensor:
    """Return the words [starts, count] of the elements from each start on, as int32."""
    first = (starts // 4).to(device)
    counters = first[:, None] + torch.arange((count + 6) // 4, device=device)
    words = _blocks(key, counters.flatten()).view(len(starts), -1)
    skipped = starts % 4
    if (skipped == skipped[0]).all():
        return words.narrow(1, int(skipped[0]), count)
    return words.gather(1, (skipped[:, None] + torch.arange(count)).to(device))


def _blocks(key: RandomKey, counters: Tensor) -> Tensor:
    """Return the four words of each counter, one after the other, as int32."""
    halves = counters.view(torch.int32)
    upper = torch.tensor([signed(x) for x in key.upper], dtype=torch.int32, device=counters.device)
    counter = halves[::2].contiguous(), halves[1::2], upper[:1], upper[1:]
    if not counters.is_cpu:
        return torch.stack(philox(counter, key.key), -1)
    # numpy multiplies integers of 64 bits twice as fast.
    x0, x1, x2, x3 = (x.numpy() for x in counter)
    return torch.stack([torch.from_numpy(x) for x in philox((x0, x1, x2, x3), key.key)], -1)


def _uniform(words: Tensor) -> Tensor:
    return words.to(torch.float32).mul_(2.0**-31)


def _normal(words: Tensor) -> Tensor:
    """Return the value of each signed word: of its sign, and exceeded in size with probability 2 |word| / 2^32."""
    intercepts, slopes = _quantile_table(words.device)
    signed = words.to(torch.float32)
    size = signed.abs()
    entry = (size.view(torch.int32) >> DROPPED_BITS).flatten()
    values = slopes.index_select(0, entry).view(words.shape).mul_(size)
    values += intercepts.index_select(0, entry).view(words.shape)
    return values.copysign_(signed)


@lru_cache
def _quantile_table(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a and b of the lines a + b x that give the quantile of probability x / 2^32 beyond it.

    Entry i is for the numbers x from 1 to 2^31 whose upper bits as float32 are i. Between the ends of an interval the
    line is off by at most 2e-6. For x = 0, the quantile is that of 1/2.
    """
    bits = np.arange(_upper_bits(1.0), _upper_bits(2.0**31) + 1)
    ends = (bits << DROPPED_BITS).astype(np.int32).view(np.float32).astype(np.float64)
    quantiles = upper_quantiles(ends / 2**32)
    slopes = np.diff(quantiles) / np.diff(ends)
    lines = np.zeros((2, len(ends) + bits[0]), np.float32)  # the quantile of 2^31, the last one, is 0
    lines[0, : bits[0]] = upper_quantiles(np.array([2.0**-33]))
    lines[:, bits[0] : -1] = quantiles[:-1] - slopes * ends[:-1], slopes
    intercepts, slopes = torch.from_numpy(lines).to(device)
    return intercepts, slopes


def _upper_bits(x: float) -> int:
    return int(np.float32(x).view(np.int32)) >> DROPPED_BITS


def upper_quantiles(p: np.ndarray) -> np.ndarray:
    """Return the values that a standard normal variable exceeds with the probabilities p, from 2^-36 to 1/2.

    The error is about 1e-7 (Wichura, Algorithm AS 241, PPND7; Applied Statistics 37, 1988).
    """
    q = 0.5 - p
    r = 0.180625 - q * q
    middle = _ratio(
        r, (59.10937472, 159.29113202, 50.434271938, 3.3871327179), (67.1875636, 78.757757664, 17.895169469)
    )
    r = np.sqrt(-_logarithm(p)) - 1.6
    tail = _ratio(r, (0.17023821103, 1.3067284816, 2.75681539, 1.4234372777), (0.12021132975, 0.7370016425))
    return np.where(q <= 0.425, q * middle, tail)


def _ratio(x: np.ndarray, above: tuple[float, ...], below: tuple[float, ...]) -> np.ndarray:
    """Return the ratio of two polynomials, from the highest coefficient on; the last one of the denominator is 1."""
    return _polynomial(x, above) / _polynomial(x, (*below, 1.0))


def _polynomial(x: np.ndarray, coefficients: tuple[float, ...]) -> np.ndarray:
    return reduce(lambda value, c: value * x + c, coefficients, np.zeros_like(x))


def _logarithm(x: np.ndarray) -> np.ndarray:
    """Return the natural logarithm, from exact operations: that of libraries depends on the processor."""
    mantissa, exponent = np.frexp(x)  # mantissa from 1/2 to 1
    s = (mantissa - 0.75) / (mantissa + 0.75)  # at most 1/5: log(mantissa / 0.75) = 2 (s + s^3 / 3 + …)
    series = 2 * s * _polynomial(s * s, tuple(1 / n for n in range(25, 0, -2)))
    return series + (exponent * 0.6931471805599453 - 0.2876820724517809)
