"""Samples: the named tensors that a declaration asks for, made of text and of seeded synthetic images and classes.

`SampleMaker.of(graph, seq).make(text, i, seed)` returns sample i by the names of the model's inputs, without the batch
dim. Which tokens are masked, which spans are removed and what an image shows are pure functions of (seed, i): a run
resumes from its number of consumed samples under any layout.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from megaloom.dsl import (
    Classification,
    DocumentIndices,
    DType,
    Graph,
    LossSums,
    MaskedScatter,
    MaskedToken,
    NextToken,
    Node,
    SequenceToSequence,
)
from megaloom.dsl.errors import UserError
from megaloom.dsl.facts.primitives import program
from megaloom.dsl.layers.losses import Stacked
from megaloom.dsl.node import primitives
from megaloom.dsl.sharding_table import SEQUENCES
from megaloom.runtime.data.part import Window
from megaloom.runtime.data.token_ids import BYTE_IDS, TokenIds

from .denoising import TargetIds, masked, sentinels_of, spans, text_length
from .sample_checks import table_rows

Sample = dict[str, Tensor]

TYPE_INPUTS = ("types", "token_type_ids")  # names of inputs of token types, as BERT's
END = 0  # the token after each document, of text that comes without its documents


class Objective(Enum):
    """The kind of labels that a sample has."""

    NEXT = "the token after each position"
    MASKED = "the tokens before masking"
    SPANS = "the removed spans of the source"
    CLASSES = "the class of each sample"
    TAGS = "the class of each token"

    @property
    def predicts_text(self) -> bool:
        """Return whether the losses are those of tokens of text."""
        return self not in (Objective.CLASSES, Objective.TAGS)


def objective_of(graph: Graph) -> Objective:
    """Return the objective of the samples of a model, by the classes of its losses. Other losses predict the next."""
    ops = [n.op for n in graph.nodes if n.is_loss and not isinstance(n.op, Stacked)]
    kinds = {
        MaskedToken: Objective.MASKED,
        SequenceToSequence: Objective.SPANS,
        Classification: Objective.CLASSES,
    }
    found = next((o for kind, o in kinds.items() if any(isinstance(op, kind) for op in ops)), Objective.NEXT)
    return Objective.TAGS if found in (Objective.NEXT, Objective.MASKED) and _predicts_tags(graph) else found


def _predicts_tags(graph: Graph) -> bool:
    """Return whether a model predicts other ids than it reads: its logits are not as many as its table has rows."""
    shapes = [graph.nodes[graph.index[name]].shape for name in graph.predictions[:1]]
    rows = _text_rows(graph)
    return rows is not None and any("vocab" in shape and shape["vocab"].known != rows for shape in shapes)


def _text_rows(graph: Graph) -> int | None:
    """Return the rows of the table that looks up the text, the first input of ids; None if there is none."""
    texts = (n for n in graph.nodes if n.is_input and n.value.dtype is DType.INDEX)
    texts = (n for n in texts if not isinstance(n.op, DocumentIndices) and n.name not in graph.only_for_losses)
    return next((rows for n in texts if (rows := table_rows(graph, n))), None)


def is_over_positions(loss: Node) -> bool:
    """Return whether a loss adds up over the positions of sequences, which context-parallel ranks share."""
    ends = [v for v, *_ in primitives(loss.value) if isinstance(v.op, LossSums)]
    return any(d.name in SEQUENCES for v in ends for d in v.args[0].shape)


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

    @classmethod
    def of(cls, graph: Graph, seq: int, text_ids: TokenIds = BYTE_IDS, *, synthetic: bool = False) -> SampleMaker:
        """Return the maker of a model's samples of `seq` tokens. Raise UserError if it predicts something else."""
        (name,) = (graph.predictions[:1]) or ("",)
        shape = graph.nodes[graph.index[name]].shape
        if "vocab" not in shape:
            raise UserError(
                f"{name} of {graph.name} is {shape}, not logits with a dim `vocab`, so there are no labels for it\n"
                "give steps with a data_step of your own"
            )
        return cls(graph, seq, objective_of(graph), shape["vocab"].known, text_ids, synthetic=synthetic)

    def reading(self, window: Window) -> SampleMaker:
        """Return the maker of the sample of this window, with its document boundaries and its predicted tokens."""
        counted = None if window.counted is None else torch.from_numpy(window.counted)
        return evolve(self, documents=torch.from_numpy(window.documents), counted=counted)

    @property
    def length(self) -> int:
        """Return the number of tokens of text that a sample reads."""
        if self.objective is Objective.SPANS:
            return text_length(self.source, ends=self.text_ids.eos is not None)
        return self.seq + 1

    def check_labels(self, data: str = "text") -> None:
        """Raise UserError if the model needs labels or images, and they are not made up. data: words for the text."""
        images = any("height" in n.shape for n in self.graph.nodes if n.is_input)
        needs = (["images"] if images else []) + ([] if self.objective.predicts_text else [self.objective.value])
        if needs and not self.synthetic:
            raise UserError(
                f"{self.graph.name} needs {' and '.join(needs)}, and {data} has none\n"
                "labels and images are not read from files yet: make samples in a data_step of your own (see the guide "
                "on losses), or give --data synthetic for made-up ones"
            )

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
            case Objective.SPANS:
                count = sentinels_of(self.length)
                return ids.vocab + (count if len(ids.sentinels) < count else 0)
        reads_text = any(n.is_input and n.value.dtype is DType.INDEX for n in self._inputs())
        return ids.vocab if reads_text and self.objective is Objective.NEXT else 0

    @property
    def _target_ids(self) -> TargetIds:
        """Return the ids of a decoder's target: those of the declared loss, and those of the tokenizer."""
        loss = next(n.op for n in self.graph.nodes if isinstance(n.op, SequenceToSequence))
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
        token, count = _image_tokens(self.graph)
        match self.objective:
            case Objective.MASKED:
                return self.vocab - 1
            case Objective.SPANS:
                return self.vocab - sentinels_of(self.length)
        return token if count else _text_rows(self.graph) or BYTE_IDS.vocab

    @property
    def ids(self) -> int:
        """Return the number of ids that tokens of text may have: those below the id that images replace."""
        token, count = _image_tokens(self.graph)
        return token if count else self.vocab

    def make(self, text: Tensor, i: int, seed: int) -> Sample:
        """Return sample i. text: int64 [length]. Raise UserError for labels or images that text does not have."""
        self.check_labels()
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, i))))
        parts = self._parts(text, random)
        if self.objective is not Objective.SPANS:
            parts["documents"] = self._documents(text)[: self.seq]
        out: Sample = {}
        for node in (n for n in self.graph.nodes if n.is_input):
            out[node.name] = self._input(node, parts, random)
        return out

    def _parts(self, text: Tensor, random: np.random.Generator) -> dict[str, Tensor]:
        """Return tokens, labels and mask [seq], of a source also its tokens [seq]; of a class its label []."""
        seq = self.seq
        match self.objective:
            case Objective.MASKED:
                return masked(text[:seq], random, self.vocab, self.text_ids)
            case Objective.SPANS:
                return spans(text, random, self.vocab, seq, self.source, self._target_ids)
            case Objective.CLASSES:
                label = torch.tensor(int(random.integers(self.vocab)))  # `check_labels` has asked for made-up ones
                return {"tokens": text[:seq], "labels": label, "mask": torch.ones(seq, dtype=torch.bool)}
            case Objective.TAGS:
                tags = torch.from_numpy(random.integers(self.vocab, size=seq))
                return {"tokens": text[:seq], "labels": tags, "mask": torch.ones(seq, dtype=torch.bool)}
        tokens, labels = text[:seq].clone(), text[1 : seq + 1].clone()
        token, count = _image_tokens(self.graph)
        if count >= seq:
            raise UserError(f"--seq {seq} leaves no text after the {count} tokens of an image: use a larger --seq")
        tokens[:count], labels[: max(0, count - 1)] = token, token
        counted = labels != token if count else torch.ones_like(labels) > 0
        if self.counted is not None:
            counted &= self.counted[1 : seq + 1]
        if self.is_packed:  # the first token of a document is not predicted from another document
            documents = self._documents(text)
            counted &= documents[1 : seq + 1] == documents[:seq]
        return {"tokens": tokens, "labels": labels, "mask": counted}

    def _documents(self, text: Tensor) -> Tensor:
        """Return the document of each token of a text, [length]. Text that comes without them has END after each."""
        if self.documents is not None:
            return self.documents
        ends = text == END
        return ends.cumsum(0) - ends.long()

    @property
    def is_packed(self) -> bool:
        """Return whether the model reads document indices."""
        return any(isinstance(n.op, DocumentIndices) for n in self.graph.nodes)

    def _input(self, node: Node, parts: dict[str, Tensor], random: np.random.Generator) -> Tensor:
        """Return the tensor of one input."""
        shape, dtype = node.shape, node.value.dtype
        if isinstance(node.op, DocumentIndices) and "documents" in parts:
            return parts["documents"]
        if "height" in shape:
            sizes = [d.known for d in shape if d.name != "batch"]
            label = int(parts["labels"]) if parts["labels"].ndim == 0 else 0
            return picture(label, sizes, random)
        if dtype is DType.MASK:
            return parts["mask"]
        if dtype is DType.FLOAT32:
            return torch.ones(self.seq)
        if dtype is not DType.INDEX or isinstance(node.op, DocumentIndices):
            raise UserError(
                f"the data has nothing for the input {node.name} {shape} of {self.graph.name}\n"
                "give steps with a data_step of your own"
            )
        if node.name in self.graph.only_for_losses:
            return parts["labels"]
        if node.name != self._first_ids(node):
            return self._token_types(node, random)
        return parts["source" if "source" in shape else "tokens"]

    def _token_types(self, node: Node, random: np.random.Generator) -> Tensor:
        """Return token types: 0, because text has no pairs, or made-up ones. Raise UserError for another input."""
        if self.synthetic:
            return torch.from_numpy(random.integers(table_rows(self.graph, node) or 1, size=self.seq))
        if node.name not in TYPE_INPUTS:
            raise UserError(
                f"the data has nothing for the input {node.name} of {self.graph.name}\n"
                f"give steps with a data_step of your own, or name the input {TYPE_INPUTS[0]} if it is a token type"
            )
        return torch.zeros(self.seq, dtype=torch.int64)

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


def picture(label: int, sizes: list[int], random: np.random.Generator) -> Tensor:
    """Return an image of a class: a pattern that the class determines, with noise."""
    pattern = np.random.Generator(np.random.Philox(label)).standard_normal(sizes)
    return torch.from_numpy((pattern + 0.5 * random.standard_normal(sizes)).astype(np.float32))


def _image_tokens(graph: Graph) -> tuple[int, int]:
    """Return the id of the tokens that images replace, and their number in a sequence; (0, 0) without images."""
    for node in graph.nodes:
        for step in program(node).steps:
            if isinstance(op := step.value.op, MaskedScatter):
                return op.token, step.value.args[1].shape.positions("embed").known
    return 0, 0
