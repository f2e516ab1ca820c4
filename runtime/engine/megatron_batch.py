"""Batches of Megatron-LM and of Hugging Face collators, as batches of the inputs that a model declares.

`loss_mask`, `position_ids` and `attention_mask` say how a model is to run. Here a model's declaration says it. So each
tensor either agrees with the declaration, becomes its `mask` or `documents`, or is refused: none is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from megaloom.dsl import Attend, DocumentIndices, DType, Graph, Node, UserError
from megaloom.dsl.node import primitives
from megaloom.runtime.ops.tensors import document_positions
from megaloom.runtime.samples.end_of_document import counts_along, restarts

from .collated_batch import IDS, of_collator

LOSS_MASK, POSITION_IDS, ATTENTION_MASK = "loss_mask", "position_ids", "attention_mask"
MEGATRON_NAMES = LOSS_MASK, POSITION_IDS, ATTENTION_MASK
PACKED_ADVICE = "declare packed(model), or give --set padded=true for a Hugging Face config.json"


def as_inputs(batch: Any, graph: Graph, seq: int, *, more: bool = False) -> Any:
    """Return a batch whose tensors have the names of the model's inputs; None for one that has None for each tensor.

    more: steps of the user's own read further tensors, so they keep `loss_mask`, `position_ids` and `attention_mask`
    too. A batch without these three and without `input_ids` stays as it is. Raise UserError for a tensor that is not
    what the model does.
    """
    if not isinstance(batch, Mapping):
        return batch
    if batch and all(x is None for x in batch.values()):
        return None
    batch, inputs = of_collator(batch, graph), {n.name for n in graph.nodes if n.is_input}
    given = {name: batch[name] for name in MEGATRON_NAMES if name in batch and name not in inputs}
    out = {name: x for name, x in batch.items() if name not in given}
    if missing := [name for name, x in out.items() if x is None]:
        raise UserError(
            f"a batch has None for {', '.join(missing)}, and tensors of other names\npass all tensors on the first "
            "rank of each data-parallel rank, and None on its others, which get them"
        )
    given = {name: x for name, x in given.items() if x is not None}
    for name, x in given.items():
        if not isinstance(x, Tensor) or not x.dim():
            raise UserError(f"{name} of a batch is a {type(x).__name__}: it must be a tensor [sequences ..]")
    return _translated(out, given, graph, seq, more=more) if given else out


def as_sample(sample: Any, graph: Graph, seq: int, *, more: bool = False) -> Any:
    """Return one sample, tensors without the dim of sequences, by the names of the model's inputs."""
    if not isinstance(sample, Mapping) or not any(name in sample for name in (*MEGATRON_NAMES, IDS)):
        return sample
    batch = {name: x[None] if isinstance(x, Tensor) else x for name, x in sample.items()}
    found = as_inputs(batch, graph, seq, more=more)
    return {name: x[0] if isinstance(x, Tensor) else x for name, x in (found or {}).items()}


def _translated(
    out: dict[str, Any], given: Mapping[str, Tensor], graph: Graph, seq: int, *, more: bool
) -> dict[str, Any]:
    """Return the inputs of a model. out: tensors by its own names. given: those of `MEGATRON_NAMES`."""
    count = max((len(x) for x in out.values() if isinstance(x, Tensor) and x.dim()), default=0)
    given = {name: _expanded(name, x, count, seq) for name, x in given.items()}
    reading = _Reading.of(graph)
    attention, counted = given.get(ATTENTION_MASK), reading.counted(out, given.get(LOSS_MASK), more=more)
    documents = own = None if reading.documents is None else out.get(reading.documents.name)
    if attention is not None and attention.dim() == 2:
        padding = reading.of_padding(attention, counted, more=more)
        documents = own if own is not None and bool(attention.all()) else padding
    elif attention is not None:
        documents = reading.of_attention(attention)
    if documents is not None and own is not None and not torch.equal(_from_0(documents), _from_0(own)):
        raise UserError(f"{ATTENTION_MASK} and {reading.name} of a batch tell of different documents: give one of them")
    if POSITION_IDS in given:
        reading.check_positions(given[POSITION_IDS], own if documents is None else documents)
    if reading.documents is not None and documents is not None:
        out = {**out, reading.documents.name: documents}
    if reading.mask is not None and counted is not None:
        out = {**out, reading.mask.name: counted}
    return {**out, **given} if more else out


@frozen
class _Reading:
    """The masks and positions that a model declares: its inputs for them, causality, kinds of learned positions."""

    model: str
    masks: tuple[Node, ...]  # of losses, with 0 and 1, or weights
    documents: Node | None
    causal: bool | None  # None: some attention is causal, and other is not
    restarts: bool
    counts_along: bool

    @classmethod
    def of(cls, graph: Graph) -> _Reading:
        masks = [n for n in graph.nodes if n.is_input and n.value.dtype in (DType.MASK, DType.FLOAT32)]
        masks = [n for n in masks if n.name in graph.only_for_losses]
        indices = [n for n in graph.nodes if isinstance(n.op, DocumentIndices)]
        ops = {v.op.causal for n in graph.nodes for v, *_ in primitives(n.value) if isinstance(v.op, Attend)}
        return cls(
            graph.name,
            tuple(masks),
            indices[0] if len(indices) == 1 else None,
            True if not ops else next(iter(ops)) if len(ops) == 1 else None,
            restarts(graph),
            counts_along(graph),
        )

    @property
    def mask(self) -> Node | None:
        """Return the only mask of the losses; None if there is none, or several."""
        return self.masks[0] if len(self.masks) == 1 else None

    @property
    def name(self) -> str:
        """Return the name of the input of document indices."""
        return "" if self.documents is None else self.documents.name

    def counted(self, out: Mapping[str, Any], loss: Tensor | None, *, more: bool) -> Tensor | None:
        """Return the mask or weights of the loss, [sequences seq]; None if the batch has none."""
        own = None if self.mask is None else out.get(self.mask.name)
        if loss is None:
            return own
        if len(self.masks) > 1 and not more:
            names = ", ".join(n.name for n in self.masks)
            raise UserError(f"{LOSS_MASK} of a batch is one mask, and {self.model} has {names}\ngive each by its name")
        if self.mask is None:
            if not more and not bool((loss == 1).all()):
                raise UserError(
                    f"{LOSS_MASK} of a batch has positions that do not count; the loss of {self.model} has no mask\n"
                    "declare NextToken(mask=mask()), or give --set conversations=true for a Hugging Face config.json"
                )
            return None
        if own is not None and not torch.equal(own.double(), loss.double()):
            raise UserError(f"{LOSS_MASK} and {self.mask.name} of a batch differ: give one of them")
        return loss

    def of_attention(self, hidden: Tensor) -> Tensor | None:
        """Return the documents that a mask [sequences 1 seq seq] keeps apart; None if the model needs none.

        Raise UserError for a mask that is not the model's.
        """
        if hidden.dim() != 4 or hidden.shape[1] != 1 or hidden.shape[2] != hidden.shape[3]:
            raise UserError(
                f"{ATTENTION_MASK} of a batch has the shape {list(hidden.shape)}\ngive that of Megatron-LM, "
                "[sequences, 1, seq, seq], True where attention is hidden, or that of Hugging Face, [sequences, seq], "
                "0 at padding"
            )
        if hidden.dtype is not torch.bool:
            raise UserError(
                f"{ATTENTION_MASK} of a batch is {hidden.dtype}: it must be bool, True where attention is hidden"
            )
        if self.causal is None:
            raise UserError(
                f"{ATTENTION_MASK} of a batch is one mask, and {self.model} has causal and other attention\nomit it"
            )
        documents = torch.stack([self._of_mask(x[0], i) for i, x in enumerate(hidden)])
        return self._apart(documents, f"{ATTENTION_MASK} of a batch keeps documents apart")

    def _of_mask(self, hidden: Tensor, i: int) -> Tensor:
        """Return the documents [seq] that the mask [seq seq] of sequence i keeps apart."""
        reads = ~hidden
        first = reads.int().argmax(-1)  # the first position that each one reads
        documents = (first == torch.arange(len(first), device=first.device)).cumsum(0) - 1
        expected = documents[:, None] == documents
        if not torch.equal(reads, expected.tril() if self.causal else expected):
            kind = "causal" if self.causal else "bidirectional"
            raise UserError(
                f"{ATTENTION_MASK} of sequence {i} of a batch is no {kind} mask of whole documents, as the attention "
                f"of {self.model} is\nTrue must hide a position, as in Megatron-LM; declare another mask as a layer"
            )
        return documents

    def of_padding(self, is_text: Tensor, counted: Tensor | None, *, more: bool) -> Tensor | None:
        """Return the documents of sequences that end with padding; None if the model needs none.

        is_text: [sequences seq], 1 for text and 0 for padding. Causal attention reads no padding at the end, but its
        loss must not count it.
        """
        text = is_text.bool()
        if not torch.equal(text.to(is_text.dtype), is_text) or bool((text.int().diff() > 0).any()):
            raise UserError(
                f"{ATTENTION_MASK} [sequences, seq] of a batch must be 1 for text, then 0 for padding at its end"
            )
        if bool(text.all()) or self.documents is not None:
            return self._apart(1 - text.long(), "")
        if self.causal and (more or (counted is not None and not bool((counted * ~text).any()))):
            return None
        fix = "set its mask to 0 there" if self.causal and self.mask is not None else PACKED_ADVICE
        if self.causal and self.mask is None:
            fix = "declare NextToken(mask=mask()), and set the mask to 0 there"
        what = "loss would count it" if self.causal else "attention would read it"
        raise UserError(f"{ATTENTION_MASK} of a batch marks padding, and {self.model}'s {what}\n{fix}")

    def _apart(self, documents: Tensor, what: str) -> Tensor | None:
        """Return documents for a model that reads them; None for one document of a model that does not."""
        if self.documents is not None:
            return documents
        if bool(documents.any()):
            raise UserError(f"{what}, and the attention of {self.model} reads whole sequences\n{PACKED_ADVICE}")
        return None

    def check_positions(self, positions: Tensor, documents: Tensor | None) -> None:
        """Raise UserError unless positions [sequences seq] are those that the model counts itself."""
        along = torch.arange(positions.shape[-1], device=positions.device)
        is_along = bool((positions == along).all())
        if documents is None or not bool(documents.diff().any()):
            if is_along:
                return
            raise UserError(
                f"{POSITION_IDS} of a batch do not count from 0 along each sequence, and neither {ATTENTION_MASK} nor "
                f"document indices say where documents begin\ngive {ATTENTION_MASK} or documents, and {PACKED_ADVICE}"
            )
        is_restarted = torch.equal(positions.long(), document_positions(documents))
        if self.restarts and not is_restarted:
            raise UserError(
                f"{POSITION_IDS} of a batch do not restart at each document; the learned positions of {self.model} do\n"
                "declare Positions(table, restart=False), or give other positions"
            )
        if self.counts_along and not is_along:
            raise UserError(
                f"{POSITION_IDS} of a batch restart; the learned positions of {self.model} count along each sequence\n"
                "declare Positions(table) without restart=False, or give other positions"
            )
        if not is_along and not is_restarted:
            raise UserError(
                f"{POSITION_IDS} of a batch count neither along each sequence nor from the beginning of each document\n"
                "omit them, or give the positions that the model counts"
            )


def _expanded(name: str, x: Tensor, count: int, seq: int) -> Tensor:
    """Return a tensor for each of `count` sequences. Megatron-LM's masks may be one for all."""
    if len(x) not in (1, count) or x.shape[-1] != seq or (name != ATTENTION_MASK and x.dim() != 2):
        raise UserError(
            f"{name} of a batch has the shape {list(x.shape)}: {count} sequences of {seq} tokens need others"
        )
    return x.expand(count, *x.shape[1:])


def _from_0(documents: Tensor) -> Tensor:
    """Return document indices [sequences seq] that count from 0 and skip no number."""
    steps = (documents.diff() != 0).long().cumsum(-1)
    return torch.cat([torch.zeros_like(steps[..., :1]), steps], -1)
