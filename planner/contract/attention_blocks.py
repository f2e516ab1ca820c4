"""Blocks of queries, by which the runtime computes attention without a fused kernel, and the keys that each reads.

The runtime computes these blocks, and the cost model prices them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from megaloom.dsl import Attend

SCORES_PER_BLOCK = 2**25  # scores of one block of queries, of all heads and sequences of a micro-batch


def local_ranges(count: int, cp: int, rank: int) -> tuple[range, ...]:
    """Return the positions of the `count` queries of a context-parallel rank.

    The sequence has 2 cp chunks, of which rank r holds chunks r and 2 cp - 1 - r.
    """
    if cp == 1:
        return (range(count),)
    n = count // 2
    return range(rank * n, (rank + 1) * n), range((2 * cp - 1 - rank) * n, (2 * cp - rank) * n)


def query_blocks(op: Attend, positions: range, heads: int, keys: int) -> Iterator[tuple[range, range]]:
    """Yield the positions of each block of queries, and those of the keys that some of them read.

    heads: of all sequences of a micro-batch. keys: positions of all keys.
    """
    count = max(1, SCORES_PER_BLOCK // (heads * keys))
    for start in range(positions.start, positions.stop, count):
        queries = range(start, min(start + count, positions.stop))
        yield queries, visible_keys(op, queries, keys)


def visible_keys(op: Attend, queries: range, keys: int) -> range:
    """Return the positions of the keys that some of these queries read."""
    if not op.causal:
        return range(keys)
    first = 0 if op.window is None else max(0, queries.start - op.window + 1)
    return range(first, min(keys, queries.stop))


@lru_cache(maxsize=1 << 12)
def block_scores(op: Attend, heads: int, queries: int, keys: int) -> tuple[int, int, int]:
    """Return the scores that a rank computes, those of its largest block, and its number of blocks.

    queries: of this rank; with fewer queries than keys, a causal sequence lies over keys / queries ranks.
    """
    cp = keys // queries if op.causal and keys % queries == 0 else 1
    blocks = [block for at in local_ranges(queries, cp, 0) for block in query_blocks(op, at, heads, keys)]
    sizes = [heads * len(rows) * len(columns) for rows, columns in blocks]
    return sum(sizes), max(sizes), len(sizes)
