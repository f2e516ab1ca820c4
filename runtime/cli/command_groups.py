"""Options of evaluate, generate, show and data, a frozen group for each command. Free of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from attrs import frozen
from cyclopts import Parameter

from megaloom.planner.contract.workload import Precision

from .defaults import TrainedPrecision


@frozen(kw_only=True)
class EvaluateOptions:
    """Data, extent and weights of an evaluation."""

    data: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="", show_default=False)] = ()
    (
        """Files or folders of text, "stdlib", "synthetic", or prefixes of indexed datasets. [default: those of the """
        """run]"""
    )
    part: Literal["all", "training", "validation", "test"] | None = None
    """The part of the data. [default: validation of the run's own data, all of others]"""
    split: str | None = None
    """Shares of training, validation and test of indexed datasets. [default: those of the run]"""
    batches: int | None = None
    """Global batches to read of each source, spread over all of it. [default: all]"""
    micro_batch: int | None = None
    """Sequences per micro-batch. [default: that of the run]"""
    averaged: Annotated[bool, Parameter(negative="")] = False
    """Use the averaged weights that a training loop of your own has kept."""
    steps_from: str | None = None
    (
        """A class with steps of your own, file.py:Class: its test_step reads the test part, its validation_step """
        """others. "none" is the loss of the model. [default: that of the run]"""
    )


@frozen(kw_only=True)
class GenerateOptions:
    """Prompts, and the layout, precision and tokenizer with which texts are written."""

    prompt: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = ()
    """Beginning of the text, or the text that an encoder reads. Repeat the option for several prompts."""
    prompt_file: Path | None = None
    """A file with one more prompt."""
    chat: Annotated[bool, Parameter(negative="")] = False
    """Put each prompt into the tokenizer's chat template, as the message of a user."""
    tp: int | None = None
    """Tensor-parallel ranks. [default: as few devices as the model fits on]"""
    pp: int | None = None
    """Pipeline ranks. [default: as few devices as the model fits on]"""
    batch_size: int = 16
    """Prompts that are written together."""
    precision: TrainedPrecision | None = None
    """Precision of weights and activations. [default: that of the run]"""
    tokenizer: str | None = None
    (
        """A tokenizer as in `megaloom data`: a folder, a file, a name on the Hugging Face hub, or "bytes". """
        """[default: that of the run]"""
    )
    tokenizer_type: str | None = None
    (
        "How a bare vocab.txt or vocab.json is used: BertWordPieceLowerCase, BertWordPieceCase, GPT2BPETokenizer, or a "
        "tokenizer class of transformers."
    )
    add_bos: Annotated[bool, Parameter(negative="")] = False
    """Begin each prompt with the tokenizer's beginning-of-text token, unless it has it already."""
    averaged: Annotated[bool, Parameter(negative="")] = False
    """Use the averaged weights that a training loop of your own has kept."""
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False
    """Print a JSON object for each sequence: prompt, text, tokens, reason, score."""


@frozen(kw_only=True)
class ShowOptions:
    """Shapes, and the form in which a model is shown."""

    seq: int | None = None
    """Tokens per sequence. [default: 4096, or the model's learned positions if fewer]"""
    batch: int = 1
    """Sequences."""
    source: int | None = None
    """Tokens per sequence of an encoder. [default: --seq]"""
    precision: Precision = Precision.BF16
    """Precision of activations."""
    svg: Path | None = None
    """A file for a drawing of the model."""
    html: Path | None = None
    """A file for a page with the drawing and the table."""
    tensors: Annotated[bool, Parameter(negative="")] = False
    (
        "List the tensors of a checkpoint instead: name, shape, type. MODEL is a run, one of its step-… folders, a "
        "packed run, a Hugging Face folder, or a checkpoint of Megatron-LM."
    )
    placements: Annotated[bool, Parameter(negative="")] = False
    (
        "List the transitions between placements instead: which values change theirs over the axes below, by which "
        "collective, forward and backward. It matters which degrees are above 1, and which above the key/value heads."
    )


@frozen(kw_only=True)
class DatasetOptions:
    """Keys, images and tokenizer with which sources become a dataset."""

    tokenizer: str | None = None
    (
        "A Hugging Face folder, a tokenizer.json, a SentencePiece *.model, a vocab.txt, a vocab.json with its "
        """merges.txt, a name on the Hugging Face hub, or "bytes"."""
    )
    tokenizer_type: str | None = None
    (
        "How a bare vocab.txt or vocab.json is used: BertWordPieceLowerCase, BertWordPieceCase, GPT2BPETokenizer, or a "
        "tokenizer class of transformers."
    )
    train_vocab: int | None = None
    """Train a BPE tokenizer with this number of tokens on the sources."""
    key: str | None = None
    (
        "Key of the text, of the messages of a conversation, or of the words of a text, in JSONL, Parquet and "
        "datasets. [default: text; image with --image-size]"
    )
    label_key: str | None = None
    (
        "Key of the labels: one class for each document, or a list with one for each word or token. A class is a name "
        "or a number. In folders of images the folders are the classes."
    )
    source_key: str | None = None
    """Key of the first text of a pair, with --target-key, instead of --key."""
    target_key: str | None = None
    """Key of the second text of a pair."""
    image_size: str | None = None
    (
        "Read images, not text, and resize them: 224, or height and width as 160x240. The source is a folder with a "
        "folder of images for each class, or has a column of images."
    )
    split_sentences: str | None = None
    (
        "Split texts of this language, such as en, into sentences: the sequences of a document, as Megatron-LM stores "
        "them for BERT and T5."
    )
    workers: int | None = None
    """Processes. [default: the number of cores]"""
    append_eos: bool = False
    """End each document with the tokenizer's end-of-text token."""
    add_bos: bool = False
    """Begin each document with the tokenizer's beginning-of-text token."""


EVALUATE, GENERATE, SHOW, DATASET = EvaluateOptions(), GenerateOptions(), ShowOptions(), DatasetOptions()
"""The defaults."""
