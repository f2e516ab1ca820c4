"""Dropout masks that do not depend on the layout.

A mask is a function of seed, step, graph node, and the position of each element: its sample in the global batch, its
place in the sequence, its channel. It is a hash, not a stream of random numbers, so that any rank can compute any part,
and recompute gives the same mask. The hash is splitmix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number
Generators, OOPSLA 2014), applied once for each dim.
"""

from __future__ import annotations

from hashlib import sha256

import torch
from attrs import evolve, frozen
from torch import Tensor

from megaloom.dsl import Attend, Drop, Op, Value
from megaloom.dsl.node import primitives

INCREMENT = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio, as a signed integer
FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
SHIFTS = (30, 27, 31)
HIGH_BITS = 32  # of a hash, which are compared with the rate
ELEMENTS = 2**22  # hashed at once: a hash takes 8 bytes, the mask 1 byte


@frozen
class MaskSource:
    """The source of all dropout masks of one micro-batch in one graph node."""

    seed: int
    step: int  # of the run
    first_sample: int  # of the micro-batch, in the global batch
    node: str = ""

    def of(self, node: str) -> MaskSource:
        """Return the source of the masks of a node."""
        return evolve(self, node=node)

    def samples(self, count: int, device: torch.device) -> Tensor:
        """Return the positions of the samples of the micro-batch in the global batch."""
        return torch.arange(count, device=device) + self.first_sample

    def key(self, number: int, device: torch.device) -> Tensor:
        """Return the hash of all but the position: an int64 without dims. number: of the dropout in its node."""
        digest = sha256(f"{self.seed} {self.step} {self.node} {number}".encode()).digest()
        return torch.full((), int.from_bytes(digest[:8], signed=True), device=device)

    def drop(self, x: Tensor, rate: float, number: int, *positions: Tensor) -> Tensor:
        """Return x after dropout. number: of it in its node. positions: the global ones along each dim of x."""
        *others, columns = positions
        rows = self.key(number, x.device)
        for index in others:
            rows = next_hash(rows[..., None], index)
        parts = rows.reshape(-1, 1).split(max(1, ELEMENTS // x.shape[-1]))
        mask = torch.cat([dropout_mask(part, columns, rate) for part in parts]).view(x.shape)
        return x * mask * (1 / (1 - rate))


def dropout_rate(op: Op) -> float:
    """Return the rate of the dropout in a primitive; 0 if it has none."""
    return op.rate if isinstance(op, Drop) else op.dropout if isinstance(op, Attend) else 0.0


def dropouts(value: Value) -> list[Value]:
    """Return the primitives of a node that have dropout, in the order in which they are numbered."""
    return [v for v, *_ in primitives(value) if dropout_rate(v.op)]


def next_hash(hashes: Tensor, index: Tensor) -> Tensor:
    """Return the hashes of one more dim. All integers wrap around at 64 bits."""
    h = hashes + (index + 1) * INCREMENT
    for shift, factor in zip(SHIFTS, FACTORS, strict=False):
        h = (h ^ _shifted(h, shift)) * factor
    return h ^ _shifted(h, SHIFTS[-1])


def dropout_mask(rows: Tensor, columns: Tensor, rate: float) -> Tensor:
    """Return the mask of the elements that stay, [.., columns], from hashes [.., 1] and positions of the columns."""
    return _shifted(next_hash(rows, columns), HIGH_BITS) >= round(rate * 2**HIGH_BITS)


def _shifted(h: Tensor, bits: int) -> Tensor:
    """Return unsigned integers shifted right: `>>` of signed integers copies the sign."""
    return (h >> bits) & (2 ** (64 - bits) - 1)
