"""Layout for generation: tensor-parallel and pipeline ranks, the nodes of each stage, and the memory that they need."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from attrs import frozen

from megaloom.dsl import Attend, Dim, Node, Sizes, Split, UserError
from megaloom.dsl.facts.primitives import fitted, program
from megaloom.dsl.sharding_table import SHARED_BY_HEADS
from megaloom.planner.contract.known_devices import MEMORY
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Precision
from megaloom.planner.rules.padding import padding_refusal
from megaloom.runtime.megatron import device

from .decoding_graph import DecodingGraph

USED_MEMORY = 0.85
"""Share of a device's memory for weights, keys and values; the rest is for activations and for the framework."""
MOST_TP = 64  # tensor-parallel ranks that a message names


@frozen
class Load:
    """Size of the largest batch: its rows, and the positions of each."""

    rows: int
    positions: int  # of each row


def generation_layout(tp: int, pp: int) -> Layout:
    """Return the layout of one replica without sequence parallelism. Experts are sharded over tp as etp."""
    return Layout(tp=tp, pp=pp, etp=tp, vocab_multiple=1)


def choose_layout(graph: DecodingGraph, load: Load, precision: Precision, tp: int | None, pp: int | None) -> Layout:
    """Return the layout with these degrees; where one is not given, the fewest devices on which the model fits.

    Of equally many devices, that with the most tensor-parallel ranks: it takes less time for a token. Raise UserError
    if the model does not divide by tp, or does not fit on this machine.
    """
    for name, degree in (("tp", tp), ("pp", pp)):
        if degree is not None and degree < 1:
            raise UserError(f"--{name} must be at least 1, got {degree}")
    if tp is not None:
        _check_tp(graph.nodes, tp)
    if pp is not None and pp > len(graph.nodes):
        raise UserError(f"--pp {pp} is more than the {len(graph.nodes)} layers of {graph.graph.name}\nuse fewer")
    most = max(1, device.gpu_count(), (tp or 1) * (pp or 1))
    legal = [n for n in range(1, most + 1) if _undivided(graph.nodes, n) is None]
    candidates = [
        generation_layout(t, p)
        for world in range(1, most + 1)
        for t in sorted((n for n in legal if world % n == 0 and tp in (None, n)), reverse=True)
        if pp in (None, p := world // t) and p <= len(graph.nodes)
    ]
    memory = _device_nbytes()
    fitting = (x for x in candidates if memory is None or stage_nbytes(graph, x, load, precision) <= memory)
    layout = candidates[0] if tp and pp else next(fitting, None)
    if layout is None:
        needed = stage_nbytes(graph, candidates[-1], load, precision) / 2**30
        raise UserError(
            f"{graph.graph.name} does not fit: {candidates[-1]} needs {needed:.1f} GiB on each device for weights, "
            f"keys and values\nuse a smaller --batch-size or --max-new-tokens, or more devices"
        )
    return layout


def _device_nbytes() -> float | None:
    """Return the memory of a device that generation may use; None if it is unknown, or that of the host."""
    known = MEMORY.get(device.preset_of(device.gpu_name()) or "") if device.gpu_count() else None
    return None if known is None else USED_MEMORY * known


def stage_bounds(graph: DecodingGraph, layout: Layout) -> tuple[int, ...]:
    """Return the first node of each stage, then the number of nodes. Stages have about equally large weights."""
    count, pp = len(graph.nodes), layout.pp
    sums = list(accumulate(weight_elements(n, layout.split) for n in graph.nodes))
    bounds = [0]
    for k in range(1, pp):
        wanted = sums[-1] * k / pp
        nearest = min(range(count), key=lambda i: abs(sums[i] - wanted)) + 1
        bounds.append(min(max(nearest, bounds[-1] + 1), count - (pp - k)))
    return (*bounds, count)


def weight_elements(node: Node, split: Split) -> int:
    """Return the elements of a node's weights on one device."""
    p = fitted(program(node), split, SHARED_BY_HEADS)
    total = 0
    for slot in node.weights:
        axes = p.table.axes(slot.outer, slot.value.shape)
        total += p.table.local(Sizes(), split, axes, p.table.among_experts(slot.outer))(slot.dims)
    return total


def stage_nbytes(graph: DecodingGraph, layout: Layout, load: Load, precision: Precision) -> int:
    """Return the bytes of weights, keys and values of the stage that has the most."""
    split, bounds = layout.split, stage_bounds(graph, layout)
    each = [weight_elements(n, split) + _cache_elements(n, split, load) for n in graph.nodes]
    stages = pairwise(bounds)
    return precision.nbytes * max(sum(each[start:stop]) for start, stop in stages)


def _cache_elements(node: Node, split: Split, load: Load) -> int:
    """Return the elements of KV caches on one device."""
    p = fitted(program(node), split, SHARED_BY_HEADS)
    keys = [a.shape for s in p.steps if isinstance(s.value.op, Attend) for a in s.value.args[1:3]]
    sizes = Sizes({d.name: load.positions for shape in keys for d in shape if d.size is None}) | {"batch": load.rows}
    return sum(p.table.local(sizes, split, p.table.axes((), shape))(shape) for shape in keys)


def _check_tp(nodes: Sequence[Node], tp: int) -> None:
    """Raise UserError if tp does not divide the dims that it shards."""
    if (d := _undivided(nodes, tp)) is not None:
        allowed = [n for n in range(1, MOST_TP + 1) if _undivided(nodes, n) is None]
        raise UserError(f"--tp {tp} does not divide {d.name}={d.size}\nuse --tp {', '.join(map(str, allowed))}")
    split = generation_layout(tp, 1).split
    for n in nodes:
        if refusal := padding_refusal(n, split):
            raise UserError("\n".join(refusal))


def _undivided(nodes: Sequence[Node], tp: int) -> Dim | None:
    """Return the first dim that tp must divide and does not; None if it divides all."""
    for n in nodes:
        table = program(n).table
        for d in dict.fromkeys(d for s in n.weights for d in s.value.shape):
            entry = table.dims.get(d.name)
            if entry is None or entry.axis != "tp" or entry.policy != "even":
                continue
            shared = d.name in SHARED_BY_HEADS and tp % d.known == 0
            if d.known % tp and not shared:
                return d
    return None
