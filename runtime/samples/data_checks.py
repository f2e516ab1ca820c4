"""Checks of the kind of data against a model: labels, pairs, images, and padding that attention must not read."""

from __future__ import annotations

from megaloom.dsl import Attend, DocumentIndices, Graph
from megaloom.dsl.errors import UserError
from megaloom.dsl.node import primitives
from megaloom.runtime.data.description import DataKind
from megaloom.runtime.data.labels import LabelUnit

from .objectives import Objective
from .sentence_pairs import order_labels

_LABELS = (
    "make a dataset with them: megaloom data SOURCE -o PREFIX --label-key KEY (for images with --image-size); or make "
    "samples in a data_step of your own (see the guide on losses), or give --data synthetic for made-up ones"
)
LABEL_UNITS = {Objective.CLASSES: LabelUnit.DOCUMENT, Objective.TAGS: LabelUnit.TOKEN}


def check_kind(graph: Graph, objective: Objective, kind: DataKind, data: str) -> None:
    """Raise UserError if a model cannot train on a kind of data. data: the name of the data, for messages."""
    images = [n for n in graph.nodes if n.is_input and "height" in n.shape]
    needs = ["images"] if images and kind.image is None else []
    if objective in LABEL_UNITS and (kind.labels is None or kind.labels.unit is not LABEL_UNITS[objective]):
        needs.append(objective.value)
    if needs:
        found = "has none" if kind == DataKind() else f"is {kind.words}"
        raise UserError(f"{graph.name} needs {' and '.join(needs)}, and {data} {found}\n{_LABELS}")
    if objective in LABEL_UNITS:
        _check_classes(graph, kind, data)
    if kind.image is not None:
        _check_images(graph, objective, kind, data)
    if kind.pairs and order_labels(graph) is not None:
        raise UserError(
            f"{data} is {kind.words}, and {graph.name} predicts the order of sentences of running text\n"
            "make the data with --key and --split-sentences, or train without the order"
        )
    if kind.pairs and objective in (Objective.NEXT, Objective.TAGS):
        raise UserError(
            f"{data} is {kind.words}, and {graph.name} predicts {objective.value}\n"
            "give a model that reads pairs: an encoder with a decoder, or BERT; or make the data with --key"
        )
    _check_padding(graph, objective, kind, data)


def _check_classes(graph: Graph, kind: DataKind, data: str) -> None:
    """Raise UserError if the data have more classes than a model."""
    classes = graph.nodes[graph.index[graph.predictions[0]]].shape["vocab"].known
    assert kind.labels is not None
    if kind.labels.classes > classes:
        names = f" ({', '.join(kind.labels.names)})" if 0 < len(kind.labels.names) <= 2 * classes else ""
        raise UserError(
            f"{data} has labels of {kind.labels.classes:,} classes{names}, and {graph.name} has {classes:,}\n"
            f'declare Dim("vocab", {kind.labels.classes}) for the classes, or give a config.json that many in id2label'
        )


def _check_images(graph: Graph, objective: Objective, kind: DataKind, data: str) -> None:
    """Raise UserError unless a model classifies images of the size that the data have."""
    images = [n for n in graph.nodes if n.is_input and "height" in n.shape]
    if objective is not Objective.CLASSES or not images:
        raise UserError(f"{data} is {kind.words}, and {graph.name} does not classify images\ngive data of its kind")
    assert kind.image is not None
    wanted = tuple(d.known for d in images[0].shape if d.name != "batch")
    if wanted != kind.image.shape:
        raise UserError(
            f"{data} has images of {_sizes(kind.image.shape)}, and {graph.name} reads {_sizes(wanted)}\n"
            f"make the data again: megaloom data … --image-size {wanted[1]}x{wanted[2]}, or declare another image(…)"
        )


def _sizes(shape: tuple[int, ...]) -> str:
    """Return channels, height and width as text."""
    return f"{shape[0]} channels, {shape[1]} x {shape[2]} pixels"


def _check_padding(graph: Graph, objective: Objective, kind: DataKind, data: str) -> None:
    """Raise UserError if samples are padded, and attention would read padding."""
    if kind.image is not None or (objective not in LABEL_UNITS and not kind.pairs):
        return
    side = "source" if any("source" in n.shape for n in graph.nodes if n.is_input) else "seq"
    if any(isinstance(n.op, DocumentIndices) and side in n.shape for n in graph.nodes):
        return
    if any(isinstance(v.op, Attend) for n in graph.nodes for v, *_ in primitives(n.value)):
        raise UserError(
            f"samples of {data} end with padding, which the attention of {graph.name} would read: it has no document "
            "indices\ngive --set padded=true for a Hugging Face config.json, or declare packed(model)"
        )
