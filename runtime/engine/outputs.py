"""The outputs of a micro-batch for steps of the user's own: this rank's shards, whole values, log-probabilities.

A step sees whole sequences, and returns sums over them that are equal on all tensor- and context-parallel ranks. What
it computes from whole values is replicated work: each rank back-propagates the whole gradient, of which `gathered`
passes on the part of the rank's own shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from attrs import frozen
from torch import Tensor

from megaloom.dsl import Graph, Node, Split, Unembed, UserError
from megaloom.dsl.facts.placement import INVARIANT, PARTIAL, Shard, Transition
from megaloom.dsl.facts.primitives import fitted, program
from megaloom.dsl.sharding_table import SEQUENCES
from megaloom.runtime.body.transitions import perform
from megaloom.runtime.megatron import fused_loss
from megaloom.runtime.megatron.build_context import megatron_dims, to_declared_order
from megaloom.runtime.megatron.kernels import zigzag_part
from megaloom.runtime.megatron.process_groups import ProcessGroups

from .loss_totals import Losses


@frozen(eq=False)
class LocalOutputs(Mapping[str, Tensor]):
    """This rank's shards of the outputs of the last stage, by graph node: the losses and what they read.

    Hidden states and logits are [seq, batch, ..], other values have their declared order. Under tp each rank has
    equally many columns of the vocabulary; those that pad it hold the lowest finite number. A value of which this rank
    has only some positions of the sequence is refused: see `Outputs.gathered`.
    """

    tensors: Mapping[str, Tensor]
    graph: Graph
    groups: ProcessGroups
    losses: Losses

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> Tensor:
        if name in self.tensors and (axes := self._axes_of_parts(name)):
            raise UserError(
                f"this rank has only its part of {name}, which is sharded over {' and '.join(axes)}\n"
                f"outputs.gathered({name!r}) returns it over whole sequences"
            )
        return self._without_padding(name) if self.groups.layout.tp == 1 else self.padded(name)

    def node(self, name: str) -> Node:
        """Return the graph node of an output. Raise UserError for another name."""
        if name not in self.tensors:
            raise UserError(f"a step has no output {name!r}: it has {', '.join(self.tensors)}")
        return self.graph.nodes[self.graph.index[name]]

    def padded(self, name: str) -> Tensor:
        """Return this rank's shard, with the lowest finite number in the columns that pad the vocabulary."""
        x, node, i = self.tensors[name], self.graph.nodes[self.graph.index[name]], self._vocab_dim(name)
        if i is None or isinstance(node.op, Unembed) or (own := self._own_columns(name, i)) == x.shape[i]:
            return x  # an Unembed has hidden its padding
        columns = torch.arange(x.shape[i], device=x.device).view([-1 if k == i else 1 for k in range(x.ndim)])
        return x.masked_fill(columns >= own, torch.finfo(x.dtype).min)

    def whole(self, name: str) -> Tensor:
        """Return a value in declared order, over whole sequences and the whole vocabulary, equal on all ranks."""
        node = self.node(name)
        if node.is_loss:
            return self._whole_sums(name)
        x = to_declared_order(node.value, self.tensors[name])
        for i, transition in gathers(node, self.groups.layout.split):
            x = perform(transition, x, i, self.groups)
        for i, d in enumerate(node.shape):
            x = x.narrow(i, 0, d.known) if d.name == "vocab" else x
        return x

    def _axes_of_parts(self, name: str) -> list[str]:
        """Return the axes over which a value lacks positions: those that shard its sequences, or the sums of a loss."""
        node, layout = self.node(name), self.groups.layout
        if node.is_loss:
            return ["cp"] if layout.cp > 1 else []
        return sorted({t.axis for i, t in gathers(node, layout.split) if node.shape.dims[i].name in SEQUENCES})

    def _whole_sums(self, name: str) -> Tensor:
        """Return the sums of a loss over whole sequences."""
        x = self.losses.counted_once(name, self.tensors[name].reshape(-1, 2)).view_as(self.tensors[name])
        return over_cp(x, self.groups)

    def _vocab_dim(self, name: str) -> int | None:
        """Return the index of the vocabulary among the dims of a tensor between modules."""
        names = [d.name for d in megatron_dims(self.graph.nodes[self.graph.index[name]].value)]
        return names.index("vocab") if "vocab" in names else None

    def _own_columns(self, name: str, i: int) -> int:
        """Return the number of this rank's columns of the vocabulary without padding."""
        vocab, columns = self.graph.nodes[self.graph.index[name]].shape["vocab"].known, self.tensors[name].shape[i]
        return max(0, min(columns, vocab - self.groups.tp_rank * columns))

    def _without_padding(self, name: str) -> Tensor:
        """Return the value of a rank that has the whole vocabulary, without the columns that pad it."""
        x, i = self.tensors[name], self._vocab_dim(name)
        return x if i is None else x.narrow(i, 0, self._own_columns(name, i))


@frozen(eq=False)
class Outputs:
    """The outputs of the last pipeline stage for a micro-batch, and the sums of the declared losses over it.

    values: this rank's shard of each loss and of what losses read, such as logits, by graph node (`LocalOutputs`).
    """

    values: LocalOutputs
    loss_sum: Tensor  # of the declared losses, with their coefficients; equal on all tp and cp ranks
    weight_sum: Tensor

    def gathered(self, name: str) -> Tensor:
        """Return a value over whole sequences and the whole vocabulary, without padding, in declared order.

        Logits are [batch, seq, vocab]. It is equal on all tp and cp ranks and differentiable, and takes the memory of
        the whole value. All of these ranks call it.
        """
        return self.values.whole(name)


def token_log_probs(outputs: Outputs, labels: Tensor, *, logits: str = "") -> Tensor:
    """Return the log-probability of each label in fp32, [batch, seq] over whole sequences, under any layout.

    labels: ids over whole sequences, such as `batch["labels"]`; or several ids for each position, [batch, seq, ids],
    such as those that a teacher finds most probable: the result has the shape of the labels. logits: the graph node, if
    losses read several. The logits are not gathered. Raise UserError for labels of another shape, or with ids beyond
    the vocabulary.
    """
    values, name = outputs.values, logits or _only_logits(outputs.values)
    node, groups = values.node(name), values.groups
    if node.shape.names[-1] != "vocab":
        raise UserError(f"{name} is {node.shape}, not logits whose last dim is `vocab`")
    parts = [(i, t) for i, t in gathers(node, groups.layout.split) if node.shape.dims[i].name in SEQUENCES]
    x = values.padded(name)
    swapped = x.ndim == 3  # between modules, logits are [seq, batch, vocab]
    own = labels.to(x.device)
    _check_labels(own, node, [*x.shape[:2][::-1], *x.shape[2:-1]] if swapped else list(x.shape[:-1]), parts, groups)
    for i, _ in parts:
        own = zigzag_part(own, i, groups.layout.cp, groups.cp_rank)
    own = own.transpose(0, 1) if swapped else own
    if own.ndim == x.ndim:
        out = _several_log_probs(x, own, groups)
    else:
        out = -fused_loss.cross_entropy(x.contiguous(), own.contiguous(), groups.collection.tp)
    out = out.transpose(0, 1) if swapped else out
    for i, transition in parts:
        out = perform(transition, out, i, groups)
    return out


def _several_log_probs(x: Tensor, ids: Tensor, groups: ProcessGroups) -> Tensor:
    """Return the log-probability of several ids of each position, from this rank's columns of the logits.

    x: [.., vocab / tp]. ids: [.., ids], of the whole vocabulary.
    """
    columns = ids - groups.tp_rank * x.shape[-1]
    own = x.gather(-1, columns.clamp(0, x.shape[-1] - 1)).float()
    own = torch.where((columns >= 0) & (columns < x.shape[-1]), own, 0.0)
    if groups.layout.tp > 1:
        own = perform(Transition("tp", PARTIAL, INVARIANT), own, None, groups)
    return own - fused_loss.log_sum_exp(x.contiguous(), groups.collection.tp)[..., None]


def gathers(node: Node, split: Split) -> list[tuple[int, Transition]]:
    """Return the transitions that make a node's output whole on each rank, with the index of the dim of each."""
    axes = fitted(program(node), split).table.axes((), node.shape.dims)
    sequence_on_tp = split.sequence_parallel and "tp" not in axes.values()
    out = []
    for i, d in enumerate(node.shape):
        over = ["tp"] * (axes.get(d.name) == "tp" or (d.name in SEQUENCES and sequence_on_tp))
        over += ["cp"] * (axes.get(d.name) == "cp")  # after tp, which divides the part of each cp rank
        out += [(i, Transition(axis, Shard.over(axis, d.name), INVARIANT)) for axis in over if split.degree(axis) > 1]
    return out


def over_cp(sums: Tensor, groups: ProcessGroups) -> Tensor:
    """Return sums of all context-parallel ranks. Each rank's gradient is that of the whole sum by its own part."""
    if groups.layout.cp == 1:
        return sums
    return perform(Transition("cp", PARTIAL, INVARIANT), sums, None, groups)


def _only_logits(values: LocalOutputs) -> str:
    """Return the only output with a dim `vocab`. Raise UserError if there are several, or none."""
    names = [name for name in values if "vocab" in values.node(name).shape]
    if len(names) != 1:
        found = f"has the logits {', '.join(names)}: name one by logits=…" if names else "has no logits"
        raise UserError(f"{values.graph.name} {found}")
    return names[0]


def _check_labels(
    labels: Tensor, node: Node, local: list[int], parts: list[tuple[int, Transition]], groups: ProcessGroups
) -> None:
    """Raise UserError unless labels are ids of the vocabulary over whole sequences. local: sizes on this rank."""
    whole = [n * (groups.layout.cp if any(k == i for k, _ in parts) else 1) for i, n in enumerate(local)]
    if list(labels.shape[: len(whole)]) != whole or labels.ndim > len(whole) + 1:
        raise UserError(f"labels have the shape {list(labels.shape)}: the logits {node.name} need {whole}")
    if labels.is_floating_point() or labels.dtype is torch.bool:
        raise UserError(f"labels are {labels.dtype}: they must be int64 ids")
    vocab, least, most = node.shape["vocab"].known, int(labels.min()), int(labels.max())
    if least < 0 or most >= vocab:
        raise UserError(
            f"labels have ids from {least} to {most}: {node.name} has ids from 0 to {vocab - 1}\n"
            "hide positions by a mask of your own"
        )
