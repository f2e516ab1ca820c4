"""All-to-all exchanges of context parallelism, between shards of the sequence and shards of the channels.

Convolution and scan run along the sequence. Rather than a part of it for all channels, each device has all of it for a
part of them: what enters is exchanged all to all, and what leaves back again. What is made of it alone, element by
element, stays as it is. megatron-core does the same (0.16.1, ssm/mamba_context_parallel.py), and also sends the gate of
Mamba there and back, which is read after the scan.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from megaloom.dsl.dims import Dim
from megaloom.dsl.ops.sequence import Conv, Scan
from megaloom.dsl.value import Value

from .primitives import Program, Step, origin

SHARED = "groups"  # channels that several heads share: where a device has fewer than cp, each gets copies


def turns(p: Program, plain: Container[int]) -> Iterator[tuple[Step, Value]]:
    """Each value that changes, once a direction, and the primitive that reads it so; `plain` is made of weights alone.

    The output, if it leaves the node as it was scanned, changes back after the last primitive.
    """
    turned: set[int] = set()  # the sources of what lies in parts of the channels
    done: set[tuple[int, bool]] = set()
    for step in p.steps:
        v, along = step.value, runs_along(step)
        read = [a for a in v.args if id(origin(a)) not in plain]
        inside = along or (v.op.elementwise and bool(read) and all(id(a.source) in turned for a in read))
        for a in read:
            if (id(a.source) in turned) is not inside and (id(a.source), inside) not in done:
                done.add((id(a.source), inside))
                yield step, a
        if inside:
            turned.add(id(v))
    if id(p.value.source) in turned:
        yield p.steps[-1], p.value


def runs_along(step: Step) -> bool:
    """Return whether a primitive runs along the sequence, channel by channel."""
    return isinstance(step.value.op, Conv | Scan)


def shared(v: Value) -> Dim | None:
    """Return the dim of channels that several heads share, if the value has it."""
    return v[SHARED] if SHARED in v.shape else None
