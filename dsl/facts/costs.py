"""The costs of one node on one device, for one micro-batch: work, collectives, saved activations, parameters.

`costs(node, batch=, seq=, split=)` sums over the primitives of a node. All counts are exact integers, of elements or
FLOPs. The precision of a workload, which a model does not know, turns elements into bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from attrs import evolve, frozen

from megaloom.dsl.dims import Dim, Shape, Sizes
from megaloom.dsl.errors import UserError
from megaloom.dsl.node import Node
from megaloom.dsl.ops.loss import is_loss
from megaloom.dsl.ops.weight import Input
from megaloom.dsl.sharding_table import WHOLE, Split
from megaloom.dsl.work_kinds import WorkKind

from .collectives import Collective, collectives, gathers_sequence
from .primitives import Program, effective_split, fitted, program, separate_ops
from .recompute import CORE
from .saved import Saved, saved_inputs, saved_parts, saved_tensors, selected_modules
from .work import Work, work_of


@frozen
class Costs:
    """Costs of one graph node on one device, for one micro-batch. Each node counts the weights that it shares.

    saved: the tensors that its backward pass reads. inputs: its inputs. `saved_parts` says which of them count for it.
    gathers_sequence: each context-parallel rank runs its convolutions and scans along whole sequences.
    params, expert_params: elements of trained weights, dense and of experts. frozen_params: elements of frozen weights.
    """

    work: tuple[Work, ...]
    collectives: tuple[Collective, ...]
    saved: tuple[Saved, ...]
    inputs: tuple[Saved, ...]
    params: int
    expert_params: int
    gathers_sequence: bool = False
    frozen_params: int = 0


def saved(
    nodes: Iterable[Node],
    *,
    batch: int,
    seq: int,
    source: int | None = None,
    split: Split = WHOLE,
    recompute: str = "none",
    modules: Iterable[str] = CORE,
) -> tuple[Saved, ...]:
    """Return the tensors that these graph nodes save for the backward pass on one device, each distinct tensor once.

    nodes: of a model or a part of it, in program order. modules: what selective recompute recomputes. Raises UserError
    for an unknown recompute mode.
    """
    selected = selected_modules(recompute, modules)
    return tuple(
        s
        for node, part in saved_parts(nodes, recompute)
        for cost in (costs(node, batch=batch, seq=seq, source=source, split=split),)
        for s in part.tensors(cost.saved, cost.inputs, selected)
    )


def costs(
    node: Node,
    *,
    batch: int,
    seq: int,
    source: int | None = None,
    split: Split = WHOLE,
    losses: bool = True,
    separate: bool = False,
) -> Costs:
    """Return the costs of one graph node on one device, for a micro-batch of this many sequences.

    source: tokens of each sequence that an encoder reads, `seq` if not given. Routing is taken to be balanced: every
    expert gets equally many tokens. losses: with False, costs of a loss are without those of cross-entropies of its
    inputs, and without the logits and labels that it saves. separate: torch runs the ops of the node's body one by
    one. Nodes of equal layers and shapes are computed once.
    """
    p, source = program(node), seq if source is None else source
    function = _costs if losses or not is_loss(p.value) else _rest
    return function(p, batch, seq, source, split, separate)


@lru_cache(maxsize=1 << 12)
def _rest(p: Program, batch: int, seq: int, source: int, split: Split, separate: bool) -> Costs:
    """Return the costs of a loss without those of cross-entropies of its inputs."""
    facts, logits = _costs(p, batch, seq, source, split, separate), logits_ports(p)
    if not logits:
        return facts
    ports = {*logits, *(i for i, v in enumerate(p.inputs) if isinstance(v.source.op, Input))}
    return evolve(
        facts,
        work=tuple(w for w in facts.work if w.kind is not WorkKind.CROSS_ENTROPY),
        collectives=tuple(c for c in facts.collectives if c.what != "crossentropy"),
        saved=tuple(s for s in facts.saved if s.port not in ports),
    )


def logits_ports(p: Program) -> tuple[int, ...]:
    """Return the inputs of a node of which it computes the cross-entropy, one for each cross-entropy."""
    ports = {id(v.source): i for i, v in reversed(list(enumerate(p.inputs)))}
    logits = (id(s.value.args[0].source) for s in p.steps if s.value.op.work_kind is WorkKind.CROSS_ENTROPY)
    return tuple(ports[i] for i in logits if i in ports)


@lru_cache(maxsize=1 << 15)
def _costs(p: Program, batch: int, seq: int, source: int, split: Split, separate: bool) -> Costs:
    split = effective_split(p, split)
    p, sizes = fitted(p, split), Sizes(batch=batch, seq=seq, source=source)
    p = separate_ops(p) if separate else p
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"{name} must be a whole number of at least 1, got {size!r}")
    renamed = [reads.renamed for step in p.steps for reads in step.reads if reads.renamed]
    sizes.update({new: sizes[old] for old, new in renamed if old in sizes})
    dense, expert = _params(p, p.weights, sizes, split)
    gathers = separate and gathers_sequence(p, split)
    return Costs(
        work=tuple(work_of(p, sizes, split)),
        collectives=collectives(p, sizes, split, gathers=gathers),
        saved=tuple(saved_tensors(p, sizes, split)),
        inputs=tuple(saved_inputs(p, sizes, split)),
        params=dense,
        expert_params=expert,
        gathers_sequence=gathers,
        frozen_params=sum(_params(p, p.frozen, sizes, split)),
    )


def _params(
    p: Program, weights: Iterable[tuple[tuple[Dim, ...], Shape]], sizes: Sizes, split: Split
) -> tuple[int, int]:
    """Return the elements of weights of a node on one device: (dense, of experts)."""
    out = {False: 0, True: 0}
    for outer, shape in weights:
        even = any(d.size is not None and d.known % split.tp == 0 for d in (*outer, *shape))
        n = p.local_elements(shape, outer, sizes, split) // (p.head_copies(shape, outer, split) if even else 1)
        out[p.table.among_experts(outer)] += n
    return out[False], out[True]
