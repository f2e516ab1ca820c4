"""Prompts of a batch: texts as tokens, and rows of token ids, which may be padded if a mask says where.

Padding is removed, not hidden: rows of several lengths are decoded together, each with positions of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import frozen

from megaloom.dsl import Graph, SequenceToSequence
from megaloom.dsl.errors import UserError
from megaloom.runtime.decoding.decoding_graph import DecodingGraph

from .batches import Prompt
from .text import PromptText
from .trained_model import TrainedModel

GivenPrompt = str | Sequence[int]
Mask = Sequence[Sequence[int]]
"""A row of 0 and 1 for each prompt: 0 at padding. A tensor [prompts, tokens] is one too."""


@frozen
class PromptReader:
    """Turns the prompts that a user gives into those of a model."""

    text: PromptText
    trained: TrainedModel
    graph: DecodingGraph
    chat: bool = False
    add_bos: bool = False

    def read(self, prompts: Sequence[GivenPrompt], mask: Mask | None) -> tuple[Prompt, ...]:
        """Return the prompts as tokens. Raise UserError for one that the model cannot begin with.

        mask: as `attention_mask` of transformers. Without it, rows that begin or end with padding are refused.
        """
        if len(prompts) == 0:
            raise UserError("there is no prompt\ngive --prompt TEXT, --prompt-file FILE, or text on standard input")
        if mask is None:
            return tuple(self._prompt(self._tokens(prompt, i)) for i, prompt in enumerate(prompts))
        if any(isinstance(prompt, str) for prompt in prompts):
            raise UserError("attention_mask is for prompts of token ids\nomit it: texts of several lengths need none")
        if len(mask) != len(prompts):
            raise UserError(f"attention_mask has {len(mask)} rows for {len(prompts)} prompts\ngive a row for each")
        rows = zip(prompts, mask, strict=True)
        return tuple(self._prompt(self._without_padding(_ids(p), _ids(m), i)) for i, (p, m) in enumerate(rows))

    def _tokens(self, prompt: GivenPrompt, row: int) -> tuple[int, ...]:
        """Return the tokens of a prompt that comes without a mask."""
        if isinstance(prompt, str):
            return self.text.chat(prompt) if self.chat else self.text.encode(prompt)
        tokens = _ids(prompt)
        for pad in sorted(self._pads):
            least = 2 if pad in self._ends else 1  # one token that begins or ends a text may be meant
            if len(tokens) >= least and {pad} in (set(tokens[:least]), set(tokens[-least:])):
                raise UserError(
                    f"prompt {row} begins or ends with token {pad}, which is padding, and would be read as text\n"
                    "give attention_mask, with 0 at padding, or leave the padding out: prompts may have several lengths"
                )
        return tokens

    def _without_padding(self, tokens: tuple[int, ...], mask: tuple[int, ...], row: int) -> tuple[int, ...]:
        """Return the tokens of a row where its mask is 1: at the end, or at the beginning of what an encoder reads."""
        count, at_end = sum(mask), self.graph.source is None
        if len(mask) != len(tokens) or not set(mask) <= {0, 1} or not count:
            raise UserError(
                f"row {row} of attention_mask does not fit prompt {row}, of {len(tokens)} tokens\n"
                "give 1 for each token and 0 for padding, and at least one token"
            )
        kept = mask[-count:] if at_end else mask[:count]
        if 0 in kept:
            side, does = ("left", "writes on after its last token") if at_end else ("right", "reads from its first one")
            raise UserError(
                f"row {row} of attention_mask has 0 among tokens or on the wrong side: {self.graph.graph.name} {does}\n"
                f"pad on the {side}: padding_side={side!r} of the tokenizer"
            )
        return tokens[-count:] if at_end else tokens[:count]

    def _prompt(self, given: tuple[int, ...]) -> Prompt:
        """Return a prompt. Raise UserError if it is empty, or the model does not have one of its tokens."""
        bos = self._begin[:1]
        if self.add_bos and not bos:
            raise UserError(
                f"the tokenizer {self.text.name} names no token that begins a text, which --add-bos needs\n"
                "name its bos_token in the tokenizer_config.json of its folder, or omit --add-bos"
            )
        tokens = (*bos, *given) if not given or (self.add_bos and given[:1] != bos) else given
        if not tokens:
            raise UserError(
                "a prompt is empty, and the tokenizer has no token that begins a text\ngive at least a character"
            )
        vocab, name = self.graph.logits.shape["vocab"].known, self.graph.graph.name
        if not 0 <= min(tokens) <= max(tokens) < vocab:
            raise UserError(
                f"token {max(tokens)} of a prompt is beyond the vocabulary of {name}, {vocab:,} tokens\n"
                f"give the tokenizer that the model was trained with: --tokenizer (here: {self.text.name})"
            )
        if self.graph.source is None:
            return Prompt(tokens)
        start = self.trained.special("decoder_start_token_id") or declared_start(self.graph.graph)
        return Prompt(start[:1], tokens)

    @property
    def _begin(self) -> tuple[int, ...]:
        """Return the token that begins a text, by the tokenizer or, if it names none, by the model's files."""
        own = self.text.tokenizer.ids.bos
        return self.trained.special("bos_token_id") if own is None else (own,)

    @property
    def _pads(self) -> set[int]:
        """Return the ids of padding, by the model's files and the tokenizer."""
        own = self.text.tokenizer.ids.pad
        return {*self.trained.special("pad_token_id"), *(() if own is None else (own,))}

    @property
    def _ends(self) -> set[int]:
        """Return the ids of the tokens that begin or end a text."""
        own = self.text.tokenizer.ids.eos
        special = (*self.trained.special("bos_token_id"), *self.trained.special("eos_token_id"))
        return {*special, *(() if own is None else (own,))}


def _ids(row: Any) -> tuple[int, ...]:
    """Return a row of integers, which may be a tensor."""
    return tuple(int(x) for x in row)


def declared_start(graph: Graph) -> tuple[int]:
    """Return the token that a decoder reads first, as the loss of its model declares it; 0 if no loss does."""
    return (next((n.op.start for n in graph.nodes if isinstance(n.op, SequenceToSequence)), 0),)
