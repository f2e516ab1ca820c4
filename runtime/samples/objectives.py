"""Objectives: what the samples of a model are to predict, by the losses in which it ends."""

from __future__ import annotations

from enum import Enum

from megaloom.dsl import (
    Classification,
    DocumentIndices,
    DType,
    Graph,
    LossSums,
    MaskedToken,
    Node,
    SequenceToSequence,
    TokenClassification,
)
from megaloom.dsl.layers.losses import Stacked
from megaloom.dsl.node import primitives
from megaloom.dsl.sharding_table import SEQUENCES

from .sample_checks import table_rows


class Objective(Enum):
    """The kind of labels that a sample has."""

    NEXT = "the token after each position"
    MASKED = "the tokens before masking"
    SPANS = "the target of each source"
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
        TokenClassification: Objective.TAGS,
    }
    found = next((o for kind, o in kinds.items() if any(isinstance(op, kind) for op in ops)), Objective.NEXT)
    return Objective.TAGS if found in (Objective.NEXT, Objective.MASKED) and _predicts_tags(graph) else found


def _predicts_tags(graph: Graph) -> bool:
    """Return whether a model predicts other ids than it reads: its logits are not as many as its table has rows."""
    shapes = [graph.nodes[graph.index[name]].shape for name in graph.predictions[:1]]
    rows = text_rows(graph)
    return rows is not None and any("vocab" in shape and shape["vocab"].known != rows for shape in shapes)


def text_rows(graph: Graph) -> int | None:
    """Return the rows of the table that looks up the text, the first input of ids; None if there is none."""
    texts = (n for n in graph.nodes if n.is_input and n.value.dtype is DType.INDEX)
    texts = (n for n in texts if not isinstance(n.op, DocumentIndices) and n.name not in graph.only_for_losses)
    return next((rows for n in texts if (rows := table_rows(graph, n))), None)


def is_over_positions(loss: Node) -> bool:
    """Return whether a loss adds up over the positions of sequences, which context-parallel ranks share."""
    ends = [v for v, *_ in primitives(loss.value) if isinstance(v.op, LossSums)]
    return any(d.name in SEQUENCES for v in ends for d in v.args[0].shape)
