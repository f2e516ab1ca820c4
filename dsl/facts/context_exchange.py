"""All-to-all exchanges of context parallelism, between shards of the sequence and shards of the channels.

Convolution and scan run along the sequence. For them, each device holds the whole sequence of a part of the channels:
an all-to-all changes from sequence shards to channel shards before, and another one back after. Elementwise ops in
between keep the channel shards. megatron-core also exchanges the gate of Mamba, which is read after the scan
(0.16.1, ssm/mamba_context_parallel.py).

Where `cp` does not divide the channels (`divides_channels`), our runtime gathers the sequence instead.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from megaloom.dsl.dims import Dim
from megaloom.dsl.sharding_table import Split
from megaloom.dsl.value import Value
from megaloom.dsl.work_kinds import WorkKind

from .primitives import Program, Step, origin

SHARED = "groups"  # channels that several heads share: copied if a device has fewer than cp of them


def values_by_channel(p: Program, weights_only: Container[int]) -> frozenset[int]:
    """Return the values that are in channel shards, by their identity: of convolutions, scans, and ops in between.

    `weights_only` are the values computed from weights alone.
    """
    out: set[int] = set()
    for step in p.steps:
        read = [a for a in step.value.args if id(origin(a)) not in weights_only]
        between = step.value.op.elementwise and bool(read) and all(id(a.source) in out for a in read)
        if runs_along(step) or between:
            out.add(id(step.value))
    return frozenset(out)


def channel_dim(p: Program, v: Value) -> Dim | None:
    """Return the dim of a value that is split into channel shards: the one that tp may shard."""
    return next((d for d in v.shape if d.name in p.table.dims and p.table.dims[d.name].axis == "tp"), None)


def channels_on_device(p: Program, d: Dim, split: Split) -> int:
    """Return the channels of a dim on one device of the tp axis."""
    return d.known // (split.tp if p.table.axis(d) == "tp" else 1)


def divides_channels(p: Program, weights_only: Container[int], split: Split) -> bool:
    """Return whether cp divides the channels of all exchanged values, or is a multiple of shared ones.

    Heads whose shared channels lie on several devices of the tp axis are not exchanged, nor is dropout.
    """
    inside = values_by_channel(p, weights_only)
    steps = [step for step in p.steps if id(step.value) in inside]
    if any(step.outer or step.value.op.work_kind is WorkKind.DROPOUT for step in steps):
        return False
    for v in (x for step in steps for x in (step.value, *step.value.args) if id(origin(x)) not in weights_only):
        d = channel_dim(p, v)
        if d is None:
            return False
        count = channels_on_device(p, d, split)
        if d.name == SHARED and (p.table.axis(d) != "tp" and split.tp > 1):
            return False
        if count % split.cp and not (d.name == SHARED and split.cp % count == 0):
            return False
    return True


def channel_exchanges(p: Program, weights_only: Container[int]) -> Iterator[tuple[Step, Value]]:
    """Yield each all-to-all as (primitive that reads the value, value), once per value and direction.

    `weights_only` are the values computed from weights alone, which need none. If the output is in channel shards, it
    is exchanged after the last primitive.
    """
    by_channel = values_by_channel(p, weights_only)
    exchanged: set[tuple[int, bool]] = set()
    for step in p.steps:
        in_channels = id(step.value) in by_channel
        for a in (a for a in step.value.args if id(origin(a)) not in weights_only):
            if (id(a.source) in by_channel) is not in_channels and (id(a.source), in_channels) not in exchanged:
                exchanged.add((id(a.source), in_channels))
                yield step, a
    if id(p.value.source) in by_channel:
        yield p.steps[-1], p.value


def runs_along(step: Step) -> bool:
    """Return whether a primitive runs along the sequence, channel by channel."""
    return step.value.op.channelwise


def shared_channels(v: Value) -> Dim | None:
    """Return the dim of channels that several heads share, if the value has it."""
    return v[SHARED] if SHARED in v.shape else None
