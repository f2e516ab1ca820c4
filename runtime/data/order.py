"""Order of samples: a permutation that depends on a seed only. It needs no memory, so no index is built or stored."""

from __future__ import annotations

from hashlib import blake2b


def permuted(index: int, count: int, key: int) -> int:
    """Return the image of `index` under a permutation of range(count) that `key` selects.

    A Feistel network on the next power of four, repeated until the result is below count. It needs no memory and does
    not depend on library versions, which numpy's and torch's generators do not promise.
    """
    half = ((count - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for feistel_round in range(4):
            left, right = right, left ^ (stable_hash(key, feistel_round, right) & mask)
        index = left << half | right
        if index < count:
            return index


def stable_hash(*parts: object) -> int:
    """Return a hash of values below 2**64 that does not depend on the process or on library versions."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")
