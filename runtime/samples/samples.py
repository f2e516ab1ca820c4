"""Samples: the named tensors that a declaration asks for, made of text, labels, pairs and images, or made up.

`SampleMaker.of(graph, seq).make(text, i, seed)` returns sample i by the names of the model's inputs, without the batch
dim. Which tokens are masked, which spans are removed and what an image shows are pure functions of (seed, i): a run
resumes from its number of consumed samples under any layout.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from attrs import asdict, evolve, frozen
from torch import Tensor

from megaloom.dsl import (
    DocumentIndices,
    DType,
    Graph,
    MaskedToken,
    NextToken,
    Node,
    SequenceToSequence,
)
from megaloom.dsl.errors import UserError
from megaloom.dsl.layers.losses import Stacked
from megaloom.runtime.data.data_split import Window
from megaloom.runtime.data.description import RUNNING_TEXT, DataKind
from megaloom.runtime.data.images import DEVIATION, MEAN
from megaloom.runtime.data.token_ids import BYTE_IDS, TokenIds

from .data_checks import check_kind
from .denoising import TargetIds, infilled, masked, paired, sentinels_of, spans, text_length
from .end_of_document import NO_ENDS, EndOfDocument, document_indices
from .image_inputs import image_tokens, picture
from .objectives import Objective, is_over_positions, objective_of, text_rows
from .padded import PaddedText, labels_of_tokens, padded_pair, padded_text
from .sample_checks import table_rows
from .sentence_pairs import order_labels, sentence_pair

Sample = dict[str, Tensor]

TYPE_INPUTS = ("types", "token_type_ids")  # names of inputs of token types, as BERT's
END = 0  # the token after each document, of text that comes without its documents


@frozen
class SampleMaker:
    """Makes the samples of one model."""

    graph: Graph
    seq: int
    objective: Objective
    vocab: int  # of the logits: ids, or classes
    text_ids: TokenIds = BYTE_IDS  # of the tokens of text
    documents: Tensor | None = None  # of the text of one sample: the document of each token, [length]
    counted: Tensor | None = None  # of the text of one sample: whether the token is predicted, [length]; None: all are
    synthetic: bool = False  # labels and images, which text does not have, are made up
    kind: DataKind = RUNNING_TEXT
    labels: Tensor | None = None  # of the sample: its class [1], or that of each token of text
    target: Tensor | None = None  # of a pair: the other text
    sentences: Tensor | None = None  # the tokens at which a sentence begins inside its document
    ends: EndOfDocument = NO_ENDS

    @classmethod
    def of(
        cls,
        graph: Graph,
        seq: int,
        text_ids: TokenIds = BYTE_IDS,
        *,
        synthetic: bool = False,
        kind: DataKind = RUNNING_TEXT,
    ) -> SampleMaker:
        """Return the maker of a model's samples of `seq` tokens. Raise UserError if it predicts something else."""
        (name,) = (graph.predictions[:1]) or ("",)
        shape = graph.nodes[graph.index[name]].shape
        if "vocab" not in shape:
            raise UserError(
                f"{name} of {graph.name} is {shape}, not logits with a dim `vocab`, so there are no labels for it\n"
                "give steps with a data_step of your own"
            )
        return cls(graph, seq, objective_of(graph), shape["vocab"].known, text_ids, synthetic=synthetic, kind=kind)

    def reading(self, window: Window) -> SampleMaker:
        """Return the maker of the sample of this window: with its document boundaries, and what it has beside text."""
        names = ("documents", "counted", "labels", "target", "sentences")
        arrays = {name: getattr(window, name) for name in names}
        given: dict[str, Any] = {name: None if x is None else torch.from_numpy(x) for name, x in arrays.items()}
        return evolve(self, **given)

    @property
    def length(self) -> int:
        """Return the number of tokens of text that a sample reads."""
        if self.objective is Objective.SPANS and not self.infills:
            return text_length(self.source, ends=self.text_ids.eos is not None)
        special = 0 if self.objective is Objective.NEXT else self.text_ids.template.count
        if self.infills:
            return max(2, min(self.seq, self.source) - (special or self.text_ids.eos is not None))
        return max(2, self.seq + 1 - special)

    def check_labels(self, data: str = "text") -> None:
        """Raise UserError if the model cannot train on the kind of data, unless they are made up. data: their name."""
        if not self.synthetic:
            check_kind(self.graph, self.objective, self.kind, data)

    @property
    def source(self) -> int:
        """Return the number of tokens that an encoder reads: as declared, else that of the sequence."""
        shapes = (n.shape for n in self._inputs() if "source" in n.shape)
        return next((size for shape in shapes if (size := shape["source"].size)), self.seq)

    @property
    def needed_ids(self) -> int:
        """Return the least vocabulary: that of the text, if the model reads text, and ids for masks or spans."""
        ids = self.text_ids
        match self.objective:
            case Objective.MASKED:
                return ids.vocab + (ids.mask is None)
            case Objective.SPANS if self.kind.pairs:
                return ids.vocab
            case Objective.SPANS if self.infills:
                return ids.vocab + (ids.mask is None)
            case Objective.SPANS:
                count = sentinels_of(self.length)
                return ids.vocab + (count if len(ids.sentinels) < count else 0)
        reads_text = any(n.is_input and n.value.dtype is DType.INDEX for n in self._inputs())
        return ids.vocab if reads_text else 0

    @property
    def known_ids(self) -> int:
        """Return the number of ids that the model has for tokens: those of its logits, unless these are classes."""
        return self.vocab if self.objective.predicts_text else text_rows(self.graph) or self.vocab

    @property
    def infills(self) -> bool:
        """Return whether running text is BART's text infilling: its loss says so, and padding of sources is marked."""
        marks = any(isinstance(n.op, DocumentIndices) and "source" in n.shape for n in self.graph.nodes)
        return self.objective is Objective.SPANS and marks and self._loss.infilling

    @property
    def _loss(self) -> SequenceToSequence:
        """Return the loss of a decoder's target."""
        return next(n.op for n in self.graph.nodes if isinstance(n.op, SequenceToSequence))

    @property
    def _target_ids(self) -> TargetIds:
        """Return the ids of a decoder's target: those of the declared loss, and those of the tokenizer."""
        loss = self._loss
        return TargetIds(loss.start, loss.padding, self.text_ids.eos, self.text_ids.sentinels)

    @property
    def counts_some(self) -> bool:
        """Return whether the model has a mask, so that training can predict some of the tokens only."""
        return any(n.is_input and n.value.dtype is DType.MASK for n in self.graph.nodes)

    @property
    def unit(self) -> str:
        """Return the unit of the loss; empty for a loss of the user's own."""
        if not self.objective.predicts_text:
            return f"nats ({'synthetic ' if self.synthetic else ''}classification)"
        declared = any(isinstance(n.op, NextToken | MaskedToken | SequenceToSequence) for n in self.graph.nodes)
        return f"nats per {self.text_ids.unit}" if declared else ""

    @property
    def counted_word(self) -> str:
        """Return what a loss is a mean over: samples, if each has a class or is summed before the mean."""
        losses = [n for n in self.graph.nodes if n.is_loss and not isinstance(n.op, Stacked)]
        what = "tokens" if any(map(is_over_positions, losses)) else "samples"
        return f"synthetic {what}" if self.synthetic else what

    def _inputs(self) -> list[Node]:
        """Return the inputs that more than losses read."""
        return [n for n in self.graph.nodes if n.is_input and n.name not in self.graph.only_for_losses]

    @property
    def drawn_ids(self) -> int:
        """Return the number of ids of made-up text: the rows of the table, without ids for masks and spans."""
        token, count = image_tokens(self.graph)
        match self.objective:
            case Objective.MASKED:
                return self.vocab - 1
            case Objective.SPANS:
                return self.vocab - sentinels_of(self.length)
        return token if count else text_rows(self.graph) or BYTE_IDS.vocab

    @property
    def ids(self) -> int:
        """Return the number of ids that tokens of text may have: those below the id that images replace."""
        token, count = image_tokens(self.graph)
        return token if count else self.vocab

    def make(self, text: Tensor, i: int, seed: int) -> Sample:
        """Return sample i. text: int64 [length]. Raise UserError for labels or images that text does not have."""
        self.check_labels()
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, i))))
        parts = self._parts(text, random)
        out: Sample = {}
        for node in (n for n in self.graph.nodes if n.is_input):
            out[node.name] = self._input(node, parts, random)
        return out

    def _parts(self, text: Tensor, random: np.random.Generator) -> dict[str, Tensor]:
        """Return tokens, labels, mask and documents [seq], of a source also its tokens; of a class its label []."""
        match self.objective:
            case Objective.NEXT:
                return self._next(text)
            case Objective.SPANS:
                sizes = self.seq, self.source
                if self.target is not None:
                    return paired(text, self.target, *sizes, self.text_ids, self._target_ids)
                if self.infills:
                    return infilled(text, random, self.vocab, *sizes, self.text_ids, self._target_ids)
                return spans(text, random, self.vocab, *sizes, self._target_ids)
            case Objective.MASKED:
                row = self._running(text, random) if self.target is None else self._row(text)
                return row | masked(row["tokens"], random, self.vocab, self.text_ids, row["is_text"])
            case _ if self.synthetic:
                return self._made_up(text, random)
        if self.kind.image is not None:
            pixels = text.reshape(self.kind.image.shape).float() / 255
            return {"image": (pixels - MEAN) / DEVIATION, "labels": self._class}
        row = self._row(text)
        if self.objective is Objective.CLASSES:
            return row | {"labels": self._class}
        assert self.labels is not None, "a piece of a document has labels"
        labels, counted = labels_of_tokens(self.labels, row["is_text"])
        return row | {"labels": labels, "mask": counted}

    @property
    def _class(self) -> Tensor:
        """Return the label of the document or image, []."""
        assert self.labels is not None, "a document has a label"
        return self.labels[0]

    def _made_up(self, text: Tensor, random: np.random.Generator) -> dict[str, Tensor]:
        """Return a text with made-up labels."""
        seq, tags = self.seq, self.objective is Objective.TAGS
        labels = torch.from_numpy(np.asarray(random.integers(self.vocab, size=seq if tags else None)))
        parts = {"tokens": text[:seq], "labels": labels, "mask": torch.ones(seq, dtype=torch.bool)}
        return parts | {"documents": self._documents(text)[:seq]}

    def _row(self, text: Tensor) -> dict[str, Tensor]:
        """Return one document, or a pair, with its special tokens and its padding."""
        ids, seq = self.text_ids, self.seq
        row = padded_text(text, ids, seq) if self.target is None else padded_pair(text, self.target, ids, seq)
        return asdict(row, recurse=False) | {"mask": ~row.is_padding}

    def _running(self, text: Tensor, random: np.random.Generator) -> dict[str, Tensor]:
        """Return running text with the special tokens of the tokenizer around it, each of the document beside it.

        If sentences are known, the text is a pair: up to one that `random` chooses, and from there on. A model that
        predicts their order gets them in it or swapped.
        """
        ids, row = self.text_ids, padded_text(text, self.text_ids, self.seq)
        if order_labels(self.graph) is not None:
            return self._ordered(row, text, random)
        most = self.seq - sum(map(len, ids.template.pair))
        inside = [] if self.sentences is None else [x for x in self.sentences.tolist() if x < most]
        if inside and any(ids.template.pair):
            at = int(random.choice(inside))
            row = padded_pair(text[:at], text[at:most], ids, self.seq)
        beside = (row.is_text.cumsum(0) - 1).clamp(min=0)
        return asdict(row, recurse=False) | {"documents": self._documents(text)[beside]}

    def _ordered(self, made_up: PaddedText, text: Tensor, random: np.random.Generator) -> dict[str, Tensor]:
        """Return a pair of sentences, and the label of their order. made_up: the row of synthetic text."""
        if self.synthetic:
            row, label = made_up, torch.from_numpy(np.asarray(random.integers(2)))
        else:
            sentences = [] if self.sentences is None else self.sentences.tolist()
            row, label = sentence_pair(text, sentences, random, self.text_ids, self.seq)
        return asdict(row, recurse=False) | {"order": label}

    def _next(self, text: Tensor) -> dict[str, Tensor]:
        """Return a text and the token after each position."""
        seq = self.seq
        tokens, labels = text[:seq].clone(), text[1 : seq + 1].clone()
        token, count = image_tokens(self.graph)
        if count >= seq:
            raise UserError(f"--seq {seq} leaves no text after the {count} tokens of an image: use a larger --seq")
        tokens[:count], labels[: max(0, count - 1)] = token, token
        counted = labels != token if count else torch.ones_like(labels) > 0
        if self.counted is not None:
            counted &= self.counted[1 : seq + 1]
        documents = self._documents(text)
        if self.ends.eod_mask_loss:
            counted &= text[:seq] != self._end
        elif self.is_packed and not self.ends.given:  # no first token of a document is predicted from another document
            counted &= documents[1 : seq + 1] == documents[:seq]
        return {"tokens": tokens, "labels": labels, "mask": counted, "documents": documents[:seq]}

    @property
    def _end(self) -> int:
        """Return the id of the end-of-document token."""
        return self.ends.token(self.text_ids.eos, self.text_ids.name)

    def _documents(self, text: Tensor) -> Tensor:
        """Return the document of each token of a text, [length]. Text that comes without them has END after each."""
        if self.ends.reset_attention_mask:
            return document_indices(text, self._end)
        return document_indices(text, END) if self.documents is None else self.documents

    @property
    def is_packed(self) -> bool:
        """Return whether the model reads document indices."""
        return any(isinstance(n.op, DocumentIndices) for n in self.graph.nodes)

    def _input(self, node: Node, parts: dict[str, Tensor], random: np.random.Generator) -> Tensor:
        """Return the tensor of one input."""
        shape, dtype = node.shape, node.value.dtype
        if isinstance(node.op, DocumentIndices):
            return parts["source_documents" if "source" in shape else "documents"]
        if "image" in parts and "height" in shape:
            return parts["image"]
        if "height" in shape:
            sizes = [d.known for d in shape if d.name != "batch"]
            label = int(parts["labels"]) if parts["labels"].ndim == 0 else 0
            return picture(label, sizes, random)
        if dtype is DType.MASK:
            return parts["mask"]
        if dtype is DType.FLOAT32:
            return torch.ones(self.seq)
        if dtype is not DType.INDEX:
            raise UserError(
                f"the data has nothing for the input {node.name} {shape} of {self.graph.name}\n"
                "give steps with a data_step of your own"
            )
        if node.name in self.graph.only_for_losses:
            return parts["order" if node.name == order_labels(self.graph) else "labels"]
        if node.name != self._first_ids(node):
            return self._token_types(node, parts, random)
        return parts["source" if "source" in shape else "tokens"]

    def _token_types(self, node: Node, parts: dict[str, Tensor], random: np.random.Generator) -> Tensor:
        """Return token types: those of a pair, 0 of other text, or made-up ones. Raise UserError for another input."""
        if self.synthetic:
            return torch.from_numpy(random.integers(table_rows(self.graph, node) or 1, size=self.seq))
        if node.name not in TYPE_INPUTS:
            raise UserError(
                f"the data has nothing for the input {node.name} of {self.graph.name}\n"
                f"give steps with a data_step of your own, or name the input {TYPE_INPUTS[0]} if it is a token type"
            )
        return parts.get("types", torch.zeros(self.seq, dtype=torch.int64))

    def _first_ids(self, node: Node) -> str:
        """Return the first input of ids of this shape that is read by more than losses: the text."""
        return next(
            n.name
            for n in self.graph.nodes
            if n.is_input
            and n.shape == node.shape
            and n.value.dtype is DType.INDEX
            and not isinstance(n.op, DocumentIndices)
            and n.name not in self.graph.only_for_losses
        )
