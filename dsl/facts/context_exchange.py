"""All-to-all exchanges of context parallelism, between shards of the sequence and shards of the channels.

Convolution and scan run along the sequence. For them, each device holds the whole sequence of a part of the channels:
an all-to-all changes from sequence shards to channel shards before, and another one back after. Elementwise ops in
between keep the channel shards. megatron-core also exchanges the gate of Mamba, which is read after the scan
(0.16.1, ssm/mamba_context_parallel.py).
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from megaloom.dsl.dims import Dim
from megaloom.dsl.ops.sequence import Conv, Scan
from megaloom.dsl.value import Value

from .primitives import Program, Step, origin

SHARED = "groups"  # channels that several heads share: copied if a device has fewer than cp of them


def channel_exchanges(p: Program, weights_only: Container[int]) -> Iterator[tuple[Step, Value]]:
    """Yield each all-to-all as (primitive that reads the value, value), once per value and direction.

    `weights_only` are the values computed from weights alone, which need none. If the output is in channel shards, it
    is exchanged after the last primitive.
    """
    by_channel: set[int] = set()  # the sources of values in channel shards
    exchanged: set[tuple[int, bool]] = set()
    for step in p.steps:
        v, mixes = step.value, runs_along(step)
        read = [a for a in v.args if id(origin(a)) not in weights_only]
        in_channels = mixes or (v.op.elementwise and bool(read) and all(id(a.source) in by_channel for a in read))
        for a in read:
            if (id(a.source) in by_channel) is not in_channels and (id(a.source), in_channels) not in exchanged:
                exchanged.add((id(a.source), in_channels))
                yield step, a
        if in_channels:
            by_channel.add(id(v))
    if id(p.value.source) in by_channel:
        yield p.steps[-1], p.value


def runs_along(step: Step) -> bool:
    """Return whether a primitive runs along the sequence, channel by channel."""
    return isinstance(step.value.op, Conv | Scan)


def shared_channels(v: Value) -> Dim | None:
    """Return the dim of channels that several heads share, if the value has it."""
    return v[SHARED] if SHARED in v.shape else None
