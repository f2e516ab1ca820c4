"""Pairs of sentences of running text, in their order or swapped, and which data have sentences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megaloom.dsl import DocumentIndices, DType, Graph, SentenceOrder
from megaloom.dsl.errors import UserError
from megaloom.runtime.data.corpus import described_ids, has_sentences, parse_blend
from megaloom.runtime.data.token_ids import TokenIds

from .padded import PaddedText, padded_pair

SWAPPED = 0.5  # share of the pairs (Devlin et al., arXiv:1810.04805, section 3.1)


def sentence_pair(
    text: Tensor, sentences: Sequence[int], random: np.random.Generator, ids: TokenIds, length: int
) -> tuple[PaddedText, Tensor]:
    """Return the two parts of a text in a row, in their order or swapped, and the label: 0 in order, 1 if swapped.

    The text is cut where a sentence begins or, if none begins inside it, at any token. sentences: the tokens at which
    one begins. length: of the row. Raise UserError if it is too short for two texts.
    """
    most = length - sum(map(len, ids.template.pair))
    if most < 2:
        raise UserError(f"--seq {length} leaves no room for two sentences\ngive a larger --seq")
    inside = [x for x in sentences if x < most]
    at = int(random.choice(inside)) if inside else int(random.integers(1, most))
    swapped = random.random() < SWAPPED
    first, second = text[:at], text[at:most]
    row = padded_pair(second, first, ids, length) if swapped else padded_pair(first, second, ids, length)
    return row, torch.tensor(int(swapped))


def order_labels(graph: Graph) -> str | None:
    """Return the input with the labels of the loss of the order of sentences; None if a model has no such loss."""
    loss = next((n for n in graph.nodes if isinstance(n.op, SentenceOrder)), None)
    inputs = () if loss is None else (graph.nodes[graph.index[name]] for name in loss.inputs)
    return next((n.name for n in inputs if n.is_input and n.value.dtype is DType.INDEX), None)


def check_sentences(graph: Graph, sources: Sequence[str]) -> None:
    """Raise UserError if a model predicts the order of sentences, and cannot learn it from the data.

    sources: the words of --data.
    """
    if order_labels(graph) is None:
        return
    what = f"{graph.name} predicts the order of sentences"
    if any(isinstance(n.op, DocumentIndices) for n in graph.nodes):
        raise UserError(
            f"{what} of texts that run over documents, and its attention stays inside a document\n"
            "omit --set padded=true, or packed(model)"
        )
    for name in parse_blend(sources).names:
        if not has_sentences(name):
            raise UserError(f"{what}, and {name} has no sentences\n{_MAKE}")
        ids = described_ids(name)
        if ids is None or not ids.template.pair[0]:
            tokenizer = f"{name} has no tokenizer" if ids is None else f"the tokenizer of {name} ({ids.name}) has none"
            raise UserError(f"{what} from [CLS], the token before a pair, and {tokenizer}\n{_MAKE}")


_MAKE = "make a dataset of them: megaloom data SOURCE -o PREFIX --split-sentences en --tokenizer FOLDER, that of a BERT"
