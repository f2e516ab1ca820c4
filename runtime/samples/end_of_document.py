"""Megatron-LM's options for end-of-document tokens: positions, attention and loss in samples of running text.

Their meaning is that of `_get_ltor_masks_and_position_ids` of megatron-core 0.16.1, datasets/gpt_dataset.py:706. A
document ends with its end-of-document token, whatever the index of the dataset says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from megaloom.dsl import DocumentIndices, DocumentPositions, DType, Graph, PositionLookup, UserError
from megaloom.dsl.node import primitives

if TYPE_CHECKING:
    from torch import Tensor  # options are read without it


@frozen(kw_only=True)
class EndOfDocument:
    """Positions, attention and loss at end-of-document tokens, as Megatron-LM's options of these names."""

    reset_position_ids: bool = False
    """Restart learned positions after each end-of-document token. Needs --reset-attention-mask."""
    reset_attention_mask: bool = False
    """Keep attention inside documents, which end with an end-of-document token. Needs a packed model."""
    eod_mask_loss: bool = False
    """Predict nothing from an end-of-document token. Needs a loss with a mask."""
    eod_token: int | None = None
    """Id of the end-of-document token. [default: that of the tokenizer of the data]"""

    @property
    def given(self) -> bool:
        """Return whether samples differ from those without these options."""
        return self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss

    @property
    def flags(self) -> str:
        """Return the options that are on, as on the command line."""
        names = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        return " ".join(f"--{name.replace('_', '-')}" for name in names if getattr(self, name))

    def check(self, graph: Graph) -> None:
        """Raise UserError for a combination of options that is not computed, or that the model is not declared for."""
        if not self.given:
            if self.eod_token is not None:
                raise UserError(
                    f"--eod-token {self.eod_token} has no effect alone\n"
                    "give --reset-attention-mask, --reset-position-ids or --eod-mask-loss, or omit it"
                )
            return
        if self.reset_position_ids and not self.reset_attention_mask:
            raise UserError(
                "--reset-position-ids without --reset-attention-mask: positions restart only where attention stays "
                "inside documents\ngive both"
            )
        if self.eod_mask_loss and not any(n.is_input and n.value.dtype is DType.MASK for n in graph.nodes):
            raise UserError(
                f"--eod-mask-loss: the loss of {graph.name} has no mask\ngive --set conversations=true for a Hugging "
                "Face config.json, or declare NextToken(mask=mask())"
            )
        self._check_packing(graph)

    def _check_packing(self, graph: Graph) -> None:
        """Raise UserError unless attention and learned positions of the model are those that the options ask for."""
        packed = any(isinstance(n.op, DocumentIndices) for n in graph.nodes)
        if self.reset_attention_mask and not packed:
            raise UserError(
                f"--reset-attention-mask: {graph.name} has no document indices, so its attention reads the whole "
                "sequence\ngive --set padded=true for a Hugging Face config.json, or declare packed(model)"
            )
        if packed and not self.reset_attention_mask:
            raise UserError(
                f"{self.flags} without --reset-attention-mask: {graph.name} is packed, so its attention stays inside "
                "documents\ngive --reset-attention-mask too, or a model that is not packed"
            )
        if self.reset_attention_mask and not self.reset_position_ids and restarts(graph):
            raise UserError(
                f"--reset-attention-mask without --reset-position-ids: the learned positions of {graph.name} restart "
                "at each document\ngive both, or declare Positions(table, restart=False)"
            )
        if self.reset_position_ids and counts_along(graph):
            raise UserError(
                f"--reset-position-ids: the learned positions of {graph.name} count along the whole sequence\n"
                "declare Positions(table) without restart=False, or omit the option"
            )

    def token(self, eos: int | None, name: str) -> int:
        """Return the id of the end-of-document token. eos: that of a tokenizer, `name`. Raise UserError if unknown."""
        found = eos if self.eod_token is None else self.eod_token
        if found is None:
            raise UserError(
                f"{self.flags}: the end-of-document token of {name} is not known\n"
                "give its id with --eod-token, such as 50256 of GPT-2"
            )
        return found


NO_ENDS = EndOfDocument()


def restarts(graph: Graph) -> bool:
    """Return whether a model has learned positions that restart at each document."""
    return _has(graph, DocumentPositions)


def counts_along(graph: Graph) -> bool:
    """Return whether a model has learned positions that count along the whole sequence."""
    return _has(graph, PositionLookup)


def _has(graph: Graph, kind: type) -> bool:
    return any(isinstance(v.op, kind) for n in graph.nodes for v, *_ in primitives(n.value))


def document_indices(text: Tensor, eod: int) -> Tensor:
    """Return the index of the document of each token, [length]. An end-of-document token is the last of its own."""
    ends = text == eod
    return ends.cumsum(0) - ends.long()
