"""Costs of the stages of many layouts at once, as arrays.

`ChainCosts` has what bounds read of every stage between two cut points. A chain is a layout's sequence of segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from attrs import frozen

from megaloom.planner.contract.layouts import Column, Rows
from megaloom.planner.cost.columns import FORWARD_COLUMNS, STATE_COLUMNS, STEP_COLUMNS, CostColumn
from megaloom.planner.cost.cost_table import CostTable
from megaloom.planner.model.structure import ModelStructure

from .dynamic_program import ChainBatch, Indices

# Sums of columns of a cost table: seconds, seconds of forward passes, saved bytes, and those of the state.
SECONDS, FORWARD, SAVED, *STATE = range(3 + len(STATE_COLUMNS))
SUMMED = (STEP_COLUMNS, FORWARD_COLUMNS, [CostColumn.SAVED], *([column] for column in STATE_COLUMNS))


@frozen(eq=False, slots=False)
class ChainCosts:
    """Costs of chains of segments: one micro-batch on one device, by SECONDS, FORWARD, SAVED and STATE.

    Chains that differ only in the number of recomputed blocks share a table.
    """

    tables: Sequence[CostTable]
    table: Column  # [chains] number of the table
    blocks: Column  # [chains] number of first blocks of each stage that are recomputed

    @property
    def structure(self) -> ModelStructure:
        """Return the structure of the model."""
        return self.tables[0].structure

    @cached_property
    def before(self) -> Rows:
        """Return the sums of all segments before each cut point: [sums, tables, cut points]."""
        rows, nodes = np.array([table.rows for table in self.tables]), self.structure.kind_of_node
        out = np.zeros((len(SUMMED), len(rows), len(nodes) + 1))
        for sums, columns in zip(out, SUMMED, strict=True):
            np.cumsum(_added(rows, columns)[:, nodes], axis=1, out=sums[:, 1:])
        return np.ascontiguousarray(out[..., self.structure.cut_points])

    @cached_property
    def recompute_before(self) -> Rows:
        """Return what recompute of all blocks adds before each node, where stages recompute their first blocks only.

        Shape: [sums, tables, nodes + 1]; zeros for other tables.
        """
        nodes = self.structure.kind_of_node
        out = np.zeros((len(SUMMED), len(self.tables), len(nodes) + 1))
        partly = [i for i, table in enumerate(self.tables) if table.recompute_rows is not None]
        if partly:
            rows = np.array([self.tables[i].recompute_rows for i in partly])[:, nodes]
            sums = np.cumsum(rows, axis=1)
            out[:, partly, 1:] = [_added(sums, columns) for columns in SUMMED]
        return out

    @cached_property
    def transient(self) -> Rows:
        """Return the bytes of p2p sends, workspace and libraries of each chain: [3, chains]."""
        each = [(t.least_boundary, t.workspace, t.library) for t in self.tables]
        return np.array(each, dtype=float).T[:, self.table]

    @cached_property
    def recompute_ends(self) -> dict[int, Indices]:
        """Return the node at which recompute of a stage from each cut point ends, by number of blocks: [cut points]."""
        cuts, counts = self.structure.cut_points, {*self.blocks.tolist()}
        return {count: self.structure.recompute_end(count)[cuts] if count else cuts for count in counts}

    def ends_of(self, which: Column) -> Indices:
        """Return `recompute_ends` of these chains: [chains, cut points]."""
        return np.array([self.recompute_ends[count] for count in self.blocks[which].tolist()])

    def stages(self, which: Column, start: Indices, end: Indices, column: int | slice = slice(None)) -> Rows:
        """Return the costs of stages of these chains between cut points: [chains, stages] each -> [sums, ...].

        column: the sum to return, or all of them.
        """
        table, cuts = self.table[which][:, None], self.structure.cut_points
        out: Rows = self.before[column, table, end] - self.before[column, table, start]
        if self.blocks[which].any():
            ends = np.take_along_axis(self.ends_of(which), start, axis=1)
            recomputed = self.recompute_before[column, table, np.minimum(cuts[end], ends)]
            out += recomputed - self.recompute_before[column, table, cuts[start]]
        return out

    def seconds(self, which: Column) -> ChainBatch:
        """Return the seconds of all stages of these chains, equal to `PartitionProblem.seconds` of each.

        Some blocks of all of these chains are recomputed, or of none.
        """
        table, cuts = self.table[which], self.structure.cut_points
        sums = self.before[SECONDS, table]
        if not self.blocks[which].any():
            return ChainBatch(sums)
        extra, ends = self.recompute_before[SECONDS, table], self.ends_of(which)
        last = cuts.searchsorted(ends, side="right") - 1
        return ChainBatch(sums, extra[:, cuts], np.take_along_axis(extra, ends, axis=1), last)

    def farthest(self, which: Column, caps: Rows) -> Indices:
        """Return, for a stage of each chain from each cut point, its farthest end within the chain's cap of seconds."""
        out, partly = np.empty((len(which), len(self.structure.cut_points)), dtype=np.intp), self.blocks[which] > 0
        for some in map(np.flatnonzero, (~partly, partly)):
            if len(some):
                out[some] = self.seconds(which[some]).farthest(caps[some])
        return out


def _added(rows: Rows, columns: Sequence[int]) -> Rows:
    """Return the sum of some columns, [..., columns] -> [...], added in their order as `segment_sums` adds them."""
    out: Rows = rows[..., columns[0]].copy()
    for column in columns[1:]:
        out += rows[..., column]
    return out
