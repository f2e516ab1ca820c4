"""One rank's part of a model that writes text: its pipeline stage, with tensor-parallel shards of the weights.

    logits, state = decoder.prefill(prompts, sources)  # all positions of prompts of one length
    logits = decoder.step(tokens, state)               # one more token of each row

Every rank calls each with equal arguments. Ranks of the last stage get the logits [rows, vocab], others None.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from functools import partial

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor

from megaloom.dsl import DType, Node, Shape
from megaloom.dsl.facts.primitives import fitted, program
from megaloom.dsl.sharding_table import SHARED_BY_HEADS
from megaloom.planner.contract.workload import Precision
from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.build_context import DTYPES, BuildContext
from megaloom.runtime.megatron.process_groups import ProcessGroups
from megaloom.runtime.modules.built_node import BuiltNode
from megaloom.runtime.modules.initial_weights import GivenValues, given_weight
from megaloom.runtime.ops.kv_cache import Rows
from megaloom.runtime.ops.tensors import dim_index

from .decoding_graph import POSITIONS, DecodingGraph
from .decoding_node import DecodingNode
from .decoding_state import DecodingState

Run = Callable[[DecodingNode, Mapping[str, Tensor], DecodingState], Tensor]


@frozen(eq=False)
class Decoder:
    """Decoding graph, and the nodes of this rank's stage with their weights."""

    graph: DecodingGraph
    bounds: tuple[int, ...]  # the first node of each stage, then the number of nodes
    groups: ProcessGroups
    nodes: tuple[DecodingNode, ...]
    dtype: torch.dtype
    last_position: int  # the first node after all that mix positions: from there on, only that position is computed

    @classmethod
    def build(
        cls,
        graph: DecodingGraph,
        bounds: tuple[int, ...],
        last_position: int,
        groups: ProcessGroups,
        precision: Precision,
        weights: GivenValues,
    ) -> Decoder:
        """Return this rank's part. Of weights that are views, each rank reads its shards."""
        context = _context(groups, precision)
        own = graph.nodes[bounds[groups.pp_rank] : bounds[groups.pp_rank + 1]]
        nodes = []
        for n in own:
            node = DecodingNode.of(n, context, context.execution(n), graph)
            BuiltNode(n, node.body, groups).fill(lambda slot, i: given_weight(slot, weights, i))
            nodes.append(node)
        return cls(graph, bounds, groups, tuple(nodes), DTYPES[precision.wide], last_position)

    def prefill(self, tokens: Tensor, source: Tensor | None) -> tuple[Tensor | None, DecodingState]:
        """Return the logits after prompts [rows, tokens] of one length, and their state.

        source: the tokens that an encoder reads, [rows, source tokens]; None without an encoder.
        """
        where, (count, length) = device.current(), tokens.shape
        positions = torch.arange(length, device=where).expand(count, length)
        inputs = self._inputs(tokens.to(where), positions)
        lengths = torch.full((count,), length, device=where)
        rows = Rows(lengths, torch.zeros_like(lengths))
        sizes = {"batch": count, self.graph.sequence.name: length}
        if source is not None and (name := self.graph.source):
            rows = evolve(rows, source_lengths=torch.full_like(lengths, source.shape[1]), least_source=source.shape[1])
            inputs[name] = source.to(where)
            inputs |= dict.fromkeys(self.graph.source_documents, torch.zeros_like(inputs[name]))
            sizes |= {d.name: source.shape[1] for d in self._shape(name) if d.name != "batch"}
        state = DecodingState(rows, length)
        return self._run(inputs, sizes, state, DecodingNode.prefill, self.graph.names), state

    def step(self, tokens: Tensor, state: DecodingState) -> Tensor | None:
        """Return the logits after one more token of each row, [rows], and add it to their state.

        The next step may overwrite the logits.
        """
        state.begin_step()
        return state.repeated.run(partial(self._step, state), tokens.to(device.current()))

    def _step(self, state: DecodingState, tokens: Tensor) -> Tensor | None:
        state.rows.count_position()
        inputs = self._inputs(tokens[:, None], state.rows.positions)
        sizes = {"batch": len(tokens), self.graph.sequence.name: 1}
        return self._run(inputs, sizes, state, DecodingNode.step, self.graph.incremental)

    def _inputs(self, tokens: Tensor, positions: Tensor) -> dict[str, Tensor]:
        """Return the inputs of the model along the written tokens."""
        inputs = {self.graph.tokens: tokens}
        inputs |= {name: torch.zeros_like(positions) for name in self.graph.documents}
        return inputs | {f"{POSITIONS}{offset}": positions + offset for offset in self.graph.offsets}

    def _run(
        self, inputs: dict[str, Tensor], sizes: dict[str, int], state: DecodingState, run: Run, names: Container[str]
    ) -> Tensor | None:
        """Run the nodes of this stage with these names, between a receive and a send."""
        stage, start = self.groups.pp_rank, self.bounds[self.groups.pp_rank]
        values, last_reads = dict(inputs), self.graph.last_reads
        if stage:
            live = (n for n in self.graph.live(start) if n.name in names)
            values |= {n.name: self._received(n, sizes, narrow=start > self.last_position) for n in live}
        for i, n in enumerate(self.nodes, start):
            if i == max(self.last_position, start):
                values = {name: self._last_position(name, x) for name, x in values.items()}
            if n.node.name in names:
                values[n.node.name] = run(n, values, state)
            for name in last_reads.get(i, ()):
                values.pop(name, None)
        if self.groups.is_last_pipeline_rank:
            return self._gathered(self._last_position(self.graph.logits.name, values[self.graph.logits.name]))
        for node in self.graph.live(self.bounds[stage + 1]):
            if node.name in names:
                sent = values[node.name].to(self._dtype(node)).contiguous()
                dist.send(sent, self._neighbour(1), group=self.groups.collection.pp)
        return None

    def _shape(self, name: str) -> Shape:
        """Return the shape of a node or an input."""
        g = self.graph.graph
        return g.nodes[g.index[name]].shape

    def _last_position(self, name: str, x: Tensor) -> Tensor:
        """Return the last of the written positions of a value; a value without them unchanged."""
        if name.startswith(POSITIONS):
            return x[:, -1:]
        shape = self._shape(name)
        if self.graph.sequence not in shape.dims:
            return x
        i = dim_index(shape, self.graph.sequence.name)
        return x.narrow(i, x.shape[i] - 1, 1)

    def _received(self, node: Node, sizes: Mapping[str, int], *, narrow: bool) -> Tensor:
        """Return a value of an earlier stage."""
        known = {**sizes, self.graph.sequence.name: 1} if narrow else sizes
        split = self.groups.layout.split
        table = fitted(program(node), split, SHARED_BY_HEADS).table
        whole = [known.get(d.name, d.size or 0) for d in node.shape]
        local = table.local(known, split, table.axes((), node.shape))
        shape = [known[d.name] if d.name in known else local.of(d) for d in node.shape]
        assert all(whole), f"{node.name} {node.shape} has a dim without a size"
        out = torch.empty(shape, dtype=self._dtype(node), device=device.current())
        dist.recv(out, self._neighbour(-1), group=self.groups.collection.pp)
        return out

    def _dtype(self, node: Node) -> torch.dtype:
        """Return the type in which a value is sent."""
        others = {DType.FLOAT32: torch.float32, DType.INDEX: torch.int64, DType.MASK: torch.bool}
        return others.get(node.value.dtype, self.dtype)

    def _neighbour(self, by: int) -> int:
        """Return the global rank of the stage before or after this one."""
        return dist.get_process_group_ranks(self.groups.collection.pp)[self.groups.pp_rank + by]

    def _gathered(self, logits: Tensor) -> Tensor:
        """Return the logits [rows, vocab] of all tensor-parallel ranks in fp32, without padding of the vocabulary."""
        node, tp = self.graph.logits, self.groups.collection.tp
        order = [dim_index(node.shape, "batch"), dim_index(node.shape, self.graph.sequence.name)]
        local = logits.permute(*order, dim_index(node.shape, "vocab"))[:, 0].float().contiguous()
        vocab = node.shape["vocab"].known
        if tp.size() == 1 or program(node).table.at(self.groups.layout.split).axis(node.shape["vocab"]) != "tp":
            return local[:, :vocab]
        parts = [torch.empty_like(local) for _ in range(tp.size())]
        dist.all_gather(parts, local, group=tp)
        return torch.cat(parts, 1)[:, :vocab]


def _context(groups: ProcessGroups, precision: Precision) -> BuildContext:
    """Return what bodies need to be built. They read the type of parameters only."""
    fields = {
        "num_layers": 1,
        "hidden_size": groups.layout.tp,
        "num_attention_heads": groups.layout.tp,
        "tensor_model_parallel_size": groups.layout.tp,
        "params_dtype": DTYPES[precision.wide],
        "cuda_graph_scope": [],  # the default prints a deprecation warning
    }
    return BuildContext(groups, fields, seq=1, precision=precision)
