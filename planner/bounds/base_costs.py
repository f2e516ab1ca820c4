"""Costs of base layouts: all that lower bounds need to know of a model, independent of schedule and partition.

A base layout fixes what node costs depend on: the device mesh, the micro-batch size, sequence parallelism and the
overlaps within a micro-batch. `price_base_layouts` computes many at once, as arrays over base layouts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from attrs import evolve, fields_dict, frozen

from megaloom.dsl.dims import Sizes
from megaloom.dsl.facts.primitives import output_elements
from megaloom.planner.contract.choices import Shard
from megaloom.planner.contract.layouts import Column, Layouts, Rows, alike
from megaloom.planner.cost import communication, memory
from megaloom.planner.cost.columns import FORWARD_COLUMNS, STATE_COLUMNS, STEP_COLUMNS, CostColumn
from megaloom.planner.cost.cost_cache import NODE_COST_FIELDS, CostCache
from megaloom.planner.cost.recompute import ModuleRecompute

# Recompute modes, columns of the arrays below: nothing recomputed; all blocks; the memory of all modules recomputed at
# the time of none. Sets of modules follow, in the order in which a search meets them.
PLAIN, FULL, IDEAL = 0, 1, 2
TINY = 1e-300  # divisor in place of 0


@frozen(eq=False)
class BaseCosts:
    """Seconds and bytes of one micro-batch through the whole model, for each base layout."""

    seconds: Rows  # [base layouts, modes] forward and backward
    saved_nbytes: Rows  # [base layouts, modes] saved activations
    workspace_nbytes: Rows  # [base layouts, modes] least workspace of the rank with the most memory
    modules: ModuleRecompute  # of the base layouts with distinct node costs
    distinct: Column  # [base layouts] index into `modules`
    state_nbytes: Rows  # [base layouts, values of `shard`] weights, gradients, optimizer
    runtime_nbytes: Rows  # [base layouts] context and communication buffers
    block_seconds: Rows  # [base layouts] fastest block, forward and backward
    recompute_seconds: Rows  # [base layouts] fastest block, to recompute it
    freed_nbytes: Rows  # [base layouts] most activations that recomputing one block frees
    forward_seconds: Rows  # [base layouts] forward alone
    segment_seconds: Rows  # [base layouts, 2] slowest segment; without recompute, and with full recompute
    block_saved_nbytes: Rows  # [base layouts, 2, 2] most saved of a block, and all outside blocks; recompute as above
    params: Column  # [base layouts] dense elements on one device, each weight once
    expert_params: Column  # [base layouts] elements of experts on one device
    send_seconds: Rows  # [base layouts] the smallest send between the two nearest stages
    blocks: int  # blocks that `recompute_layers` counts

    def joined(self, more: BaseCosts) -> BaseCosts:
        """Return the costs of these base layouts, then of more of them. Only the first three modes remain."""
        by_mode = ("seconds", "saved_nbytes", "workspace_nbytes")
        special = (*by_mode, "modules", "distinct", "blocks")
        columns = {
            name: np.concatenate([getattr(self, name), getattr(more, name)])
            for name in fields_dict(BaseCosts)
            if name not in special
        }
        modes = {
            name: np.concatenate([getattr(part, name)[:, : IDEAL + 1] for part in (self, more)]) for name in by_mode
        }
        return BaseCosts(
            **columns,
            **modes,
            modules=self.modules.joined(more.modules),
            distinct=np.concatenate([self.distinct, more.distinct + len(self.modules.saved)]),
            blocks=self.blocks,
        )

    def with_modules(self, module_bits: int) -> BaseCosts:
        """Return the costs with one more mode: recompute of this set of modules."""
        seconds, freed, workspace = (column[self.distinct] for column in self.modules.of_set(module_bits))
        return evolve(
            self,
            seconds=np.column_stack([self.seconds, self.seconds[:, PLAIN] + seconds]),
            saved_nbytes=np.column_stack([self.saved_nbytes, self.saved_nbytes[:, PLAIN] - freed]),
            workspace_nbytes=np.column_stack([self.workspace_nbytes, self.workspace_nbytes[:, PLAIN] + workspace]),
        )


def price_base_layouts(base: Layouts, cache: CostCache) -> BaseCosts:
    """Return the costs of these base layouts. Node costs are computed once for those that share them."""
    first, distinct = alike(*(getattr(base, name) for name in NODE_COST_FIELDS))
    priced, structure = base.take(first), cache.structure
    rows, parts, full_saved, transient = cache.rows(priced)
    kinds, blocks, segments = structure.kind_counts, structure.distinct_blocks, structure.distinct_segments
    outside = kinds - structure.kind_counts_in_blocks
    in_block = np.array([kind.in_recomputed_block for kind in structure.kinds])
    plain, forward = rows[:, :, STEP_COLUMNS].sum(axis=2), rows[:, :, FORWARD_COLUMNS].sum(axis=2)
    repeated = np.where(in_block, forward, 0.0)
    saved = rows[:, :, CostColumn.SAVED]
    freed = np.where(in_block, saved - full_saved, 0.0)
    modules = ModuleRecompute.of(structure, parts, saved @ kinds)
    workspace = transient.max(axis=1) + cache.job.library_nbytes
    elements = _parameters(rows, priced, cache)[:, distinct]
    by_recompute = [(_extreme(t @ blocks.T, np.max), t @ outside) for t in (saved, full_saved)]
    return BaseCosts(
        seconds=np.array([t @ kinds for t in (plain, plain + repeated, plain)]).T[distinct],
        saved_nbytes=np.array([saved @ kinds, full_saved @ kinds, saved @ kinds - modules.most]).T[distinct],
        workspace_nbytes=np.array([workspace, workspace + saved @ structure.largest_block, workspace]).T[distinct],
        modules=modules,
        distinct=distinct,
        state_nbytes=_state(base, elements, cache),
        runtime_nbytes=_runtime(base, cache),
        block_seconds=_extreme(plain @ blocks.T, np.min)[distinct],
        recompute_seconds=_extreme(repeated @ blocks.T, np.min)[distinct],
        freed_nbytes=_extreme(freed @ blocks.T, np.max)[distinct],
        forward_seconds=(forward @ kinds)[distinct],
        segment_seconds=np.array([_extreme(t @ segments.T, np.max) for t in (plain, plain + repeated)]).T[distinct],
        block_saved_nbytes=np.array(by_recompute).transpose(2, 0, 1)[distinct],
        params=elements[0],
        expert_params=elements[1],
        send_seconds=_send_seconds(base, cache),
        blocks=structure.recomputable_blocks,
    )


def _parameters(rows: Rows, priced: Layouts, cache: CostCache) -> Column:
    """Return the elements of the whole model on one device, each weight once, and the bytes of narrow copies.

    Shape: [dense, of experts, frozen, copies; layouts].
    """
    structure, whole = cache.structure, rows[:, :, STATE_COLUMNS].transpose(2, 0, 1) @ cache.structure.kind_counts
    if structure.shared_weights:
        first, which = alike(priced.tp, priced.cp, priced.sequence_parallel)
        for i, (slot, nodes) in enumerate(structure.shared_weights):
            sizes = [cache.shared(priced[int(k)])[i] for k in first]
            whole[0 if slot.trained else 2] -= (len(nodes) - 1) * np.array(sizes)[which]
    return np.asarray(whole.astype(np.int64))


def _state(base: Layouts, elements: Column, cache: CostCache) -> Rows:
    """Return the bytes of weights, gradients and optimizer state, for each value of `shard`: [layouts, values].

    elements: of `_parameters`.
    """
    out, (params, experts, fixed, copies) = [], elements
    for shard in Shard:
        layouts = evolve(base, shard=np.full(len(base), int(shard)))
        out.append(memory.rank_state(params, experts, layouts, cache.job, fixed, copies).total)
    return np.array(out, dtype=float).T


def _runtime(base: Layouts, cache: CostCache) -> Rows:
    """Return the bytes of the device context and of communication buffers."""
    sizes = (base.tp, base.cp, base.dp * base.cp, base.pp, base.ep, base.etp, base.edp)
    first, which = alike(*((n > 1).astype(np.int64) for n in sizes), np.minimum(base.ep, communication.PEERS))
    values = [float(communication.reserved_bytes(base[int(i)], cache.cluster, cache.profile)) for i in first]
    return np.array(values)[which]


def _send_seconds(base: Layouts, cache: CostCache) -> Rows:
    """Return the seconds of the smallest send between the first two stages, which share a node if any do."""
    structure, seq = cache.structure, cache.workload.seq
    first, which = alike(base.micro_batch, base.cp, base.tp, base.sequence_parallel)
    layouts = base.each(first)
    shapes, crossing = structure.live_shapes
    sizes = (Sizes(batch=x.micro_batch, seq=seq, source=seq) for x in layouts)
    elements = [output_elements(shapes, of, x.split) for of, x in zip(sizes, layouts, strict=True)]
    crossing = crossing[structure.cut_points[1:]]
    distinct = crossing[alike(*crossing.T)[0]]
    least = (distinct @ np.array(elements).T).min(axis=0)
    nbytes = cache.workload.precision.nbytes * least[which]
    first, which = alike(nbytes, base.pp, base.tp, base.sequence_parallel)
    scattered = cache.profile.overlap.scattered_sends
    values = [
        communication.p2p_seconds(n, 0, x, cache.cluster, scattered=scattered)
        for n, x in zip(nbytes[first].tolist(), base.each(first), strict=True)
    ]
    return np.array(values)[which]


def _extreme(rows: Rows, of: Callable[..., Rows]) -> Rows:
    """Return the least or the greatest of each row, 0 for empty rows."""
    return of(rows, axis=1) if rows.shape[1] else np.zeros(len(rows))
