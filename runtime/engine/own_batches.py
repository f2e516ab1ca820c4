"""Batches of a loop of the user's own, as samples of a data-parallel rank; and logits gathered over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor, nn

from megaloom.dsl import Graph, Node
from megaloom.dsl.errors import UserError
from megaloom.dsl.sharding_table import SEQUENCES
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Workload
from megaloom.runtime.launch.agreement import agreed, gathered
from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.kernels import from_zigzag
from megaloom.runtime.megatron.process_groups import ProcessGroups
from megaloom.runtime.modules.model_chunk import ModelChunk
from megaloom.runtime.samples.sample_checks import check_sample
from megaloom.runtime.samples.samples import Sample, SampleMaker

Batch: TypeAlias = Mapping[str, Tensor] | Tensor
"""Named tensors [sequences ..] for the inputs of a model, or text, token ids [sequences, seq + 1]."""


def samples_of(
    batch: Batch, graph: Graph, seq: int, data_step: Callable[[Tensor], Sample], *, more: bool = False
) -> list[Sample]:
    """Return the samples of a batch. `data_step` makes one of text. Raise UserError for a batch that does not fit.

    more: the batch may have tensors beside the inputs of the model.
    """
    if isinstance(batch, Tensor):
        _check_text(batch, SampleMaker.of(graph, seq))
        return [data_step(text) for text in batch.to(torch.int64)]
    return named_samples(batch, graph, seq, more=more)


def named_samples(batch: Mapping[str, Tensor], graph: Graph, seq: int, *, more: bool = False) -> list[Sample]:
    """Return the samples of a batch of named tensors. It is as `samples_of` else."""
    if not isinstance(batch, Mapping) or not all(isinstance(x, Tensor) and x.dim() for x in batch.values()):
        kind = type(batch).__name__
        raise UserError(f"a batch is a tensor of token ids, or tensors by the names of inputs; got {kind}")
    if len(lengths := {name: len(x) for name, x in batch.items()}) and len(set(lengths.values())) != 1:
        raise UserError(f"the tensors of a batch have different numbers of sequences: {lengths}")
    samples = [{name: x[i] for name, x in batch.items()} for i in range(max(lengths.values(), default=0))]
    for sample in samples:
        check_sample(graph, sample, seq, more=more)
    return samples


def _check_text(batch: Tensor, maker: SampleMaker) -> None:
    """Raise UserError unless a batch holds token ids [sequences, tokens of a sample]."""
    if batch.dim() != 2 or batch.shape[1] != maker.length:
        raise UserError(
            f"a batch of text has shape [sequences, {maker.length}], the tokens that a sample of {maker.seq} reads; "
            f"got {list(batch.shape)}"
        )
    if batch.dtype.is_floating_point or batch.dtype is torch.bool:
        raise UserError(f"a batch of text holds token ids, integers; got {batch.dtype}")
    if len(batch) and not 0 <= int(batch.min()) <= int(batch.max()) < maker.ids:
        given = f"{int(batch.min())} to {int(batch.max())}"
        raise UserError(f"token ids must be from 0 to {maker.ids - 1}; the batch has ids from {given}")


def global_samples(samples: list[Sample], workload: Workload, layout: Layout) -> Callable[[int], Sample]:
    """Return a function from the index of a sample in the global batch to this data-parallel rank's sample.

    Micro-batch k of data-parallel rank r is the global micro-batch k · dp + r; here its samples begin at k · its size.
    Raise UserError unless the rank has its share of the global batch.
    """
    size, share = layout.micro_batch, workload.batch // layout.dp
    if len(samples) != share:
        raise UserError(
            f"the batch has {len(samples)} sequences, but each data-parallel rank takes {share} a step "
            f"(batch {workload.batch} / dp {layout.dp})\ngive each data-parallel rank its own {share}"
        )
    return lambda i: samples[i // (size * layout.dp) * size + i % size]


def check_multiple(samples: list[Sample], micro_batch: int) -> None:
    """Raise UserError unless samples of an evaluation are whole micro-batches."""
    if micro_batch < 1:
        raise UserError(f"micro_batch must be at least 1, got {micro_batch}")
    if len(samples) % micro_batch:
        raise UserError(
            f"a batch to evaluate has {len(samples)} sequences, not a multiple of micro_batch={micro_batch}\n"
            f"give a multiple of {micro_batch} sequences"
        )


def filled(samples: list[Sample], last: Sample | None) -> list[Sample]:
    """Return samples for an evaluation; where a rank has none left, its last one, which does not count."""
    if last is None:
        raise UserError("this data-parallel rank has no batch to evaluate, but others have; give it one")
    return samples or [last]


def logits_node(graph: Graph) -> Node:
    """Return the node that computes the logits that the first loss reads."""
    return graph.nodes[graph.index[graph.predictions[0]]]


@contextmanager
def captured_logits(chunks: list[ModelChunk]) -> Iterator[list[Tensor]]:
    """Collect the local logits of each micro-batch, [seq / cp, size, vocab / tp], on the rank that computes them."""
    captured: list[Tensor] = []

    def keep_output(module: nn.Module, inputs: object, output: Tensor) -> None:
        captured.append(output.detach().clone())  # the loss may overwrite them

    name = logits_node(chunks[0].graph).name
    nodes = (item for chunk in chunks for item in chunk.node_modules())
    hooks = [module.register_forward_hook(keep_output) for node, module in nodes if node.name == name]
    try:
        yield captured
    finally:
        for hook in hooks:
            hook.remove()


def gathered_logits(captured: list[Tensor], graph: Graph, groups: ProcessGroups) -> Tensor:
    """Return whole logits [sequences, seq, vocab] from those of micro-batches. All tp and cp ranks call it."""
    shape = logits_node(graph).shape
    has_seq = any(d.name in SEQUENCES for d in shape)
    whole = gather_from_tensor_model_parallel_region(torch.cat(captured, int(has_seq)), groups.collection.tp)
    whole = whole[..., : shape["vocab"].known]
    if not has_seq:
        return whole
    if groups.layout.cp > 1:
        parts = [torch.empty_like(whole.contiguous()) for _ in range(groups.layout.cp)]
        dist.all_gather(parts, whole.contiguous(), group=groups.collection.cp)
        whole = from_zigzag(torch.cat(parts), groups.layout.cp)
    return whole.transpose(0, 1).contiguous()


def gathered_rows(x: Tensor | None, groups: ProcessGroups) -> Tensor | None:
    """Return tensors [rows ..] of the data-parallel ranks, joined in the order of the ranks; None where all have none.

    Raise UserError on all ranks unless those of one data-parallel group have tensors of one type that differ in their
    rows only, or all of them None.
    """
    place = groups.tp_rank, groups.cp_rank, groups.pp_rank
    found = gathered((place, groups.dp_rank, None if x is None else (x.dtype, list(x.shape))))
    peers = {dp_rank: kind for other, dp_rank, kind in found if other == place}
    kinds = [peers[dp_rank] for dp_rank in range(groups.layout.dp)]
    agreed(lambda: _check_joined(kinds))
    if x is None or len(kinds) == 1:
        return x
    rows = [shape[0] for _, shape in filter(None, kinds)]
    own = x.detach().to(device.current())
    padded = torch.cat([own, own.new_zeros(max(rows) - len(own), *own.shape[1:])]).contiguous()
    parts = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(parts, padded, group=groups.of_axis("dp"))
    return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])


def _check_joined(kinds: list[tuple[torch.dtype, list[int]] | None]) -> None:
    """Raise UserError unless tensors of data-parallel ranks can be joined. kinds: type and shape of each."""
    first = kinds[0]
    like = [k is not None and first is not None and (k[0], k[1][1:]) == (first[0], first[1][1:]) for k in kinds]
    if not (all(kind is None for kind in kinds) or (all(like) and first and first[1])):
        shown = ", ".join("None" if kind is None else f"{kind[0]} {kind[1]}" for kind in kinds)
        raise UserError(
            f"data-parallel ranks have tensors that cannot be joined: {shown}\n"
            "give tensors [rows ..] of one type that differ in their rows only; a number is a tensor [1]"
        )
