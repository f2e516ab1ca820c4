"""What every node of a graph costs under one way to divide it: seconds and bytes of a micro-batch on one device.

Protocol: `sheet` has the costs under a split, a micro-batch and a recompute mode. Nodes that are alike are priced once;
`CostTable.sums` adds up runs of nodes, `CostTable.total` all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import cached_property

import numpy as np
from attrs import frozen

from megaloom.dsl.dims import Dim, Sizes
from megaloom.dsl.facts.primitives import program
from megaloom.dsl.graph import Node, Slot, primitives
from megaloom.dsl.ops.dot import Dot
from megaloom.dsl.ops.weight import Weight
from megaloom.dsl.sharding_table import Split
from megaloom.planner.contract.choices import Overlap, Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Rows
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.planner.model.structure import ModelStructure
from megaloom.planner.partition.segments import Indices, SegmentSums


class CostColumn(IntEnum):
    """The columns of a sheet: seconds, then bytes, then elements."""

    FORWARD = 0  # kernels
    BACKWARD = 1
    AGAIN = 2  # kernels of the forward pass that the backward pass repeats
    TP_FORWARD = 3  # collectives, all of them exposed
    CP_FORWARD = 4
    EP_FORWARD = 5
    TP_BACKWARD = 6  # those of recompute included
    CP_BACKWARD = 7
    EP_BACKWARD = 8
    SAVED = 9
    PARAMS = 10
    EXPERT_PARAMS = 11


FORWARD_COLUMNS = [
    CostColumn.FORWARD,
    CostColumn.TP_FORWARD,
    CostColumn.CP_FORWARD,
    CostColumn.EP_FORWARD,
]  # what a forward step takes
RECOMPUTE_COLUMNS = [
    CostColumn.AGAIN,
    CostColumn.TP_BACKWARD,
    CostColumn.CP_BACKWARD,
    CostColumn.EP_BACKWARD,
]  # where that is counted when done again
BACKWARD_COLUMNS = [CostColumn.BACKWARD, *RECOMPUTE_COLUMNS]
STEP_COLUMNS = [*FORWARD_COLUMNS, *BACKWARD_COLUMNS]
MODULE_COLUMNS = [
    *FORWARD_COLUMNS,
    CostColumn.SAVED,
]  # what a module that is computed again takes again, and what it frees
AXIS_COLUMNS = {  # where the collectives of an axis are counted
    "tp": (CostColumn.TP_FORWARD, CostColumn.TP_BACKWARD),
    "cp": (CostColumn.CP_FORWARD, CostColumn.CP_BACKWARD),
    "ep": (CostColumn.EP_FORWARD, CostColumn.EP_BACKWARD),
    "etp": (CostColumn.EP_FORWARD, CostColumn.EP_BACKWARD),
}


@frozen(eq=False, slots=False)
class CostTable:
    """The costs of every node: `rows` by kind."""

    structure: ModelStructure
    rows: Rows  # [kinds, columns]
    boundary: int  # bytes of each hidden state that crosses a cut, one way
    workspace: int  # bytes that come and go: the gradients beside the largest saved tensor, and a block made again
    library: int  # bytes that libraries hold throughout
    loss: int  # bytes that come and go with the loss
    shared: tuple[int, ...]  # elements of each shared weight on this device
    more: Rows | None = None  # what the first blocks of a stage cost more, which are computed again, if not all are
    layers: int = 0  # how many those are

    @cached_property
    def total(self) -> Rows:
        """The sum over all nodes."""
        return self.structure.kind_counts @ self.rows

    @cached_property
    def step(self) -> float:
        """Seconds of a micro-batch through the whole model, both ways."""
        return float(self.total[STEP_COLUMNS].sum())

    @cached_property
    def saved(self) -> float:
        """Bytes that the whole model keeps of a micro-batch."""
        return float(self.total[CostColumn.SAVED])

    @cached_property
    def params(self) -> tuple[int, int]:
        """The elements of the whole model on this device, each weight once: dense ones, and experts'."""
        twice = sum(
            n * (len(nodes) - 1) for (_, nodes), n in zip(self.structure.shared_weights, self.shared, strict=True)
        )
        return int(self.total[CostColumn.PARAMS]) - twice, int(self.total[CostColumn.EXPERT_PARAMS])

    @cached_property
    def by_node(self) -> Rows:
        """[nodes, columns]"""
        return self.rows[self.structure.kind_of_node]

    def sums(self, bounds: tuple[int, ...]) -> Rows:
        """The sum over each run of nodes between neighbouring bounds: [runs, columns]."""
        sums: Rows = np.add.reduceat(self.by_node, bounds[:-1])
        if self.more is None:
            return sums
        first, last = np.array(bounds[:-1]), np.array(bounds[1:])
        stop = np.minimum(last, self.structure.recompute_end(self.layers)[first])
        sums += self._more[stop] - self._more[first]
        return sums

    @cached_property
    def _more(self) -> Rows:
        """Of all nodes before each place: [nodes + 1, columns]."""
        assert self.more is not None
        return before(self.more[self.structure.kind_of_node])

    def runs(self, places: Indices, columns: Sequence[int]) -> SegmentSums:
        """The sum of these columns over all nodes between each two places of a cut: all places, or all borders."""
        key = (len(places), *columns)
        if key not in self._known:
            self._known[key] = self._runs(places, columns)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[int, ...], SegmentSums]:
        return {}

    def _runs(self, places: Indices, columns: Sequence[int]) -> SegmentSums:
        sums = np.concatenate([[0.0], np.cumsum(self.rows[:, columns].sum(axis=1)[self.structure.kind_of_node])])[
            places
        ]
        if self.more is None:
            return SegmentSums(sums)
        more, stop = self._more[:, columns].sum(axis=1), self.structure.recompute_end(self.layers)[places]
        return SegmentSums(sums, more[places], more[stop], np.searchsorted(places, stop, side="right") - 1)


def before(rows: Rows) -> Rows:
    """The sums of all rows before each place, the end included."""
    return np.concatenate([np.zeros((1, *rows.shape[1:])), np.cumsum(rows, axis=0)])


def split_of(layout: Layout) -> Split:
    """The part of a layout that divides tensors."""
    return Split(tp=layout.tp, cp=layout.cp, ep=layout.ep, etp=layout.etp, sequence_parallel=layout.sequence_parallel)


@frozen
class BareTable:
    """A sheet before recompute, with what recompute needs: by kind, the columns and each part's share of them."""

    rows: Rows
    again: Rows  # [kinds, parts, MODULE_COLUMNS]
    full: Rows  # [kinds], the bytes that full recompute keeps
    largest: int  # bytes of the largest saved tensor
    library: int  # bytes that libraries hold throughout
    loss: int  # bytes that come and go with the loss


def bare_to_table(base: BareTable, structure: ModelStructure, layout: Layout, workload: Workload) -> CostTable:
    """The costs under the layout's recompute mode."""
    rows, workspace = base.rows.copy(), 2 * base.largest
    width = workload.precision.nbytes
    tokens = layout.micro_batch * workload.seq // layout.cp
    boundary = width * structure.hidden_size * tokens // (layout.tp if layout.sequence_parallel else 1)
    if layout.recompute is Recompute.SELECTIVE:
        made = base.again[:, structure.recomputed_parts(layout.recomputed_modules)].sum(axis=1)
        rows[:, RECOMPUTE_COLUMNS] += made[:, : len(FORWARD_COLUMNS)]
        rows[:, CostColumn.SAVED] -= made[:, -1]
        workspace += int(made[:, -1].max())
    elif layout.recompute is Recompute.FULL:
        inside = np.array([kind.in_recomputed_block for kind in structure.kinds])
        rows[:, RECOMPUTE_COLUMNS] += inside[:, None] * rows[:, FORWARD_COLUMNS]
        workspace += int(structure.largest_block @ base.rows[:, CostColumn.SAVED])
        rows[:, CostColumn.SAVED] = base.full
    if layout.has_overlap(
        Overlap.EXPERTS
    ):  # a block goes ahead while another's goes back, and is whole before that is gone
        workspace += int(structure.largest_block @ rows[:, CostColumn.SAVED])
    some = layout.full_recompute and layout.recompute_layers > 0
    return CostTable(
        structure=structure,
        rows=base.rows if some else rows,
        boundary=boundary,
        workspace=workspace,
        library=base.library,
        loss=base.loss,
        shared=shared(structure, layout, workload),
        more=rows - base.rows if some else None,
        layers=layout.recompute_layers,
    )


def loss(structure: ModelStructure, layout: Layout, workload: Workload, copies: int) -> int:
    """Bytes that come and go with the loss: logits and what it keeps of them, or their gradient and their weights'."""
    ends = [structure.graph.nodes[structure.graph.index[name]] for name in structure.graph.outputs]
    logits = sum(local(node, node.shape.dims, layout, workload) for node in ends)
    weights = max((local(node, slot.dims, layout, workload) for node in ends for slot in node.weights), default=0)
    width = workload.precision.nbytes
    copied = 0 if workload.precision is Precision.FP32 else copies  # of which they are their own
    return max((width + copied) * logits, width * (logits + weights))


def factors(structure: ModelStructure, layout: Layout, workload: Workload) -> int:
    """Elements on one device of each product's weight that differs from the others; of copies, one."""
    nodes = {id(program(kind.node)): kind.node for kind in structure.kinds if not kind.has_loss}
    matrices = ((node, slot) for node in nodes.values() for slot in _factors(node))
    return sum(local(node, slot.value.shape.dims, layout, workload, slot.outer) for node, slot in matrices)


def _factors(node: Node) -> list[Slot]:
    """The weights that products take."""
    p = program(node)
    read = {id(x.source) for step in p.steps if isinstance(step.value.op, Dot) for x in step.value.args}
    weights = (v for v, *_ in primitives(p.value) if isinstance(v.op, Weight))
    return [slot for v, slot in zip(weights, node.weights, strict=True) if id(v.source) in read]


def shared(structure: ModelStructure, layout: Layout, workload: Workload) -> tuple[int, ...]:
    """The elements on one device of each weight that several nodes share."""
    nodes = structure.graph.nodes
    return tuple(local(nodes[users[0]], slot.dims, layout, workload) for slot, users in structure.shared_weights)


def local(node: Node, dims: tuple[Dim, ...], layout: Layout, workload: Workload, outer: tuple[Dim, ...] = ()) -> int:
    """The elements that one device holds of a tensor of a node, within these copies."""
    sizes = Sizes(batch=layout.micro_batch, seq=workload.seq)
    split = split_of(layout)
    table = program(node).table.at(split)
    return table.local(sizes, split, table.axes(outer, dims))(dims)
