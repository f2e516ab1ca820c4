"""The data of a run, checked against its model, and samples of it by number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Graph
from megaloom.planner.contract.plans import Plan
from megaloom.runtime.data.corpus import Corpus, indexed_corpus, kind_of, open_corpus, parse_blend
from megaloom.runtime.data.data_split import COUNTED_TOKENS, DataSplit, RowUnit, Window
from megaloom.runtime.data.description import RUNNING_TEXT
from megaloom.runtime.data.split import DEFAULT_SPLIT, SPLIT_NAMES, SplitUnit
from megaloom.runtime.data.synthetic import SYNTHETIC, is_synthetic, synthetic_corpus
from megaloom.runtime.data.text_files import existing
from megaloom.runtime.data.token_ids import BYTE_IDS, TokenIds
from megaloom.runtime.data.tokenizer import load_tokenizer, tokenizer_of
from megaloom.runtime.optimizer.recipe import Recipe
from megaloom.runtime.options.groups import STDLIB, DataOptions
from megaloom.runtime.samples.class_names import check_class_names
from megaloom.runtime.samples.end_of_document import NO_ENDS, EndOfDocument
from megaloom.runtime.samples.objectives import Objective
from megaloom.runtime.samples.samples import Sample, SampleMaker
from megaloom.runtime.samples.sentence_pairs import check_sentences

if TYPE_CHECKING:
    from megaloom.runtime.engine.steps import Steps  # its module imports megatron-core


def open_data(options: DataOptions, ends: EndOfDocument, maker: SampleMaker, folder: Path) -> Corpus:
    """Return the data of a run. Raise UserError for bad data, or data that the model cannot train on."""
    ends.check(maker.graph)
    corpus = open_sources(options.data, options.split, folder, maker)
    maker = of_corpus(maker, corpus, ends)
    check_text(corpus, maker)
    check_ends(corpus, maker)
    return corpus


def of_corpus(maker: SampleMaker, corpus: Corpus, ends: EndOfDocument = NO_ENDS) -> SampleMaker:
    """Return the maker of samples of these data."""
    return evolve(maker, text_ids=corpus.ids, kind=corpus.kind, synthetic=is_synthetic(corpus), ends=ends)


def open_sources(sources: Sequence[str], split: str | None, folder: Path, maker: SampleMaker) -> Corpus:
    """Return the data that --data and --split name. Raise UserError for bad data, or of another vocabulary."""
    if tuple(sources) == (SYNTHETIC,):
        return synthetic_corpus(folder, maker.drawn_ids, maker.length, split)
    maker = evolve(maker, kind=kind_of(sources))
    corpus = open_corpus(sources, split, folder, lambda ids: check_vocabulary(ids, maker), split_unit(maker))
    return _by_rows(corpus, maker)


def split_unit(maker: SampleMaker) -> SplitUnit:
    """Return what --split counts for a model: sequences for the next token, as Megatron-LM does, else documents."""
    return SplitUnit.SEQUENCES if maker.objective is Objective.NEXT else SplitUnit.DOCUMENTS


def _by_rows(corpus: Corpus, maker: SampleMaker) -> Corpus:
    """Return data whose samples have one document each, where the model predicts labels or reads pairs."""
    if maker.objective is Objective.TAGS and corpus.kind.labels is not None:
        unit = RowUnit.PIECE
    elif corpus.kind.pairs or (maker.objective is Objective.CLASSES and corpus.kind != RUNNING_TEXT):
        unit = RowUnit.DOCUMENT
    else:
        return corpus
    train, *others = (p and evolve(p, rows=unit) for p in (corpus.train, corpus.validation, corpus.test))
    assert train
    return evolve(corpus, train=train, validation=others[0], test=others[1])


def check_data(options: DataOptions, ends: EndOfDocument, maker: SampleMaker) -> None:
    """Raise UserError for data that `open_data` refuses, as far as that shows without copying text."""
    ends.check(maker.graph)
    if options.data == (SYNTHETIC,):
        _check_made_up(ends)
        return
    maker = evolve(maker, kind=kind_of(options.data))
    corpus = indexed_corpus(options.data, options.split, lambda ids: check_vocabulary(ids, maker), split_unit(maker))
    if corpus is not None:
        maker = of_corpus(maker, corpus, ends)
        check_text(_by_rows(corpus, maker), maker)
        check_ends(corpus, maker)
    elif (source := parse_blend(options.data).names[0]) != STDLIB:
        existing(source)


def check_labels(graph: Graph, sources: Sequence[str], steps: object = None, *, ref: str = "") -> None:
    """Raise UserError if a model cannot train on the kind of data, such as without labels, and no data step helps.

    ref: the full reference of the model, if its config.json may name classes.
    """
    if not makes_samples(steps) and tuple(sources) != (SYNTHETIC,):
        kind, data = kind_of(sources), f"--data {' '.join(sources)}"
        SampleMaker.of(graph, 1, kind=kind).check_labels(data)
        if ref:
            check_class_names(ref, kind, data)
        check_sentences(graph, sources)


def makes_samples(steps: object) -> bool:
    """Return whether steps have a data step of their own, not that of `Steps`, whose module imports megatron-core."""
    own = getattr(steps, "data_step", None)
    return own is not None and getattr(own, "__qualname__", "") != "Steps.data_step"


def check_vocabulary(ids: TokenIds, maker: SampleMaker) -> None:
    """Raise UserError unless the model's vocabulary has all ids of the data."""
    needed = evolve(maker, text_ids=ids).needed_ids
    if maker.known_ids < needed:
        text = f"text is read as bytes, which are {ids.vocab} tokens"
        if ids.unit != "byte":
            text = f"the data's tokenizer has {ids.vocab:,} tokens ({ids.name})"
        more = ""
        if needed > ids.vocab:
            spans = maker.objective is Objective.SPANS
            use = "sentinels of T5's span corruption" if spans and not maker.infills else "masks"
            more = f", and {needed - ids.vocab} more ids are needed for {use}"
            if spans and not maker.infills and ids.mask is not None:
                more += " (give --set padded=true for BART's text infilling, which uses the mask token)"
        raise UserError(
            f"{maker.graph.name} has a vocabulary of {maker.known_ids:,}; {text}{more}\n"
            f'declare Dim("vocab", {needed}) or more, or give --set vocab={needed} if the model has such an argument'
        )


def check_tokenizer(corpus: Corpus, sources: Sequence[str], folder: Path, owner: str) -> None:
    """Raise UserError if weights were trained with a tokenizer that is known, and it is not that of the data.

    sources: the words of --data. folder: that of the tokenizer, if there is one. owner: a text that names the weights.
    Tokens that were added to a trained tokenizer are not compared.
    """
    own, words = tokenizer_of((folder,)), " ".join(sources)
    if own == BYTE_IDS.name:
        return
    if corpus.ids == BYTE_IDS:
        raise UserError(
            f"--data {words} is read as bytes, and {owner} has a tokenizer\n"
            f"tokenize the text, and give --data PREFIX: megaloom data {words} -o PREFIX --tokenizer {own}"
        )
    if corpus.tokenizer and load_tokenizer(str(corpus.tokenizer)).vocabulary != load_tokenizer(own).vocabulary:
        raise UserError(
            f"--data {words} was made with another tokenizer ({corpus.tokenizer}) than that of {owner}\n"
            f"tokenize the text again: megaloom data TEXT -o PREFIX --tokenizer {own}"
        )


def check_text(corpus: Corpus, maker: SampleMaker) -> None:
    """Raise UserError unless the model can train on the kind of data, and each split has enough text."""
    seq = maker.length - 1
    if corpus.counts_some and not maker.counts_some:
        raise UserError(
            f"the data are conversations, of which training predicts the assistant's tokens, and the loss of "
            f"{maker.graph.name} has no mask\n"
            "give --set conversations=true for a Hugging Face config.json, or declare NextToken(mask=mask())"
        )
    corpus.train.windows(seq)
    for data in (corpus.validation, corpus.test):
        if data and not data.held_out_samples(seq):
            raise UserError(
                f"the {data.name} text has {data.count:,} tokens, too few for --seq {seq:,}\n"
                "give more text, another --split, or a smaller --seq"
            )


def check_ends(corpus: Corpus, maker: SampleMaker) -> None:
    """Raise UserError unless the data are running text in which documents end as the options of the run say."""
    ends = maker.ends
    if not ends.given:
        return
    if maker.objective is not Objective.NEXT or corpus.kind != RUNNING_TEXT or corpus.counts_some:
        data = "conversations" if corpus.counts_some else corpus.kind.words
        raise UserError(
            f"{ends.flags} are for running text of which each next token is predicted; {maker.graph.name} predicts "
            f"{maker.objective.value}, and the data are {data}\nomit the options"
        )
    if is_synthetic(corpus):
        _check_made_up(ends)
    token = ends.token(corpus.ids.eos, corpus.ids.name)
    first = corpus.train.ranges[0]
    if not bool((first.dataset.array[first.start : min(first.stop, first.start + COUNTED_TOKENS)] == token).any()):
        raise UserError(
            f"{ends.flags}: the training text has no end-of-document token {token}\n"
            "make the data with --append-eos, or give another --eod-token"
        )


def _check_made_up(ends: EndOfDocument) -> None:
    """Raise UserError for options that need documents."""
    if ends.given:
        raise UserError(f"{ends.flags}: made-up text has no documents\nomit the options, or give --data")


def empty_validation(corpus: Corpus, split: str | None) -> str | None:
    """Return a text that says so if the validation split of the data is empty, else None. split: as given."""
    return None if corpus.validation else empty_split(SPLIT_NAMES[1], split)


def empty_split(name: str, split: str | None) -> str:
    """Return a text that says that a split of the data is empty. split: as given."""
    return f"the {name} part of --split {split or DEFAULT_SPLIT} is empty"


def check_keep_best(corpus: Corpus, split: str | None, best: int) -> None:
    """Raise UserError if checkpoints are to be kept by their validation loss, and there is none."""
    if best and (empty := empty_validation(corpus, split)):
        raise UserError(
            f"--keep-best {best} compares validation losses, and {empty}\n"
            "give it a larger share, such as --split 90,10, or omit --keep-best"
        )


def steps_of(epochs: float, corpus: Corpus, maker: SampleMaker, recipe: Recipe, batch: int) -> int:
    """Return the number of steps that visit the training text `epochs` times."""
    wanted, samples, steps = epochs * corpus.train.windows(maker.length - 1), 0, 0
    while samples < wanted and (size := recipe.batch_at(samples, batch)) < batch:
        samples, steps = samples + size, steps + 1
    return steps + max(0, math.ceil((wanted - samples) / batch))


def check_rampup(recipe: Recipe, plan: Plan) -> None:
    """Raise UserError unless each batch of a growing batch is whole micro-batches on every data-parallel rank."""
    if recipe.rampup_batch is None:
        return
    layout, batch = plan.layout, plan.workload.batch
    recipe.batch_at(0, batch)
    unit = layout.micro_batch * layout.dp * (layout.microbatch_group_size if layout.vpp > 1 else 1)
    for flag, size in (("batch", recipe.rampup_batch), ("increment", recipe.rampup_increment or recipe.rampup_batch)):
        if size % unit:
            raise UserError(
                f"--rampup-{flag} {size} is not a multiple of {unit}, the sequences of a micro-batch on all "
                f"data-parallel ranks\ngive a multiple of {unit}, or a smaller --micro-batch"
            )


def training_sample(data: DataSplit, maker: SampleMaker, steps: Steps, i: int, seed: int) -> Sample:
    """Return sample i of training. Raise UserError as `sample_of` does."""
    return sample_of(data.sample(i, seq=maker.length - 1, seed=seed), maker, steps, i, seed)


def held_out_sample(data: DataSplit, maker: SampleMaker, steps: Steps, i: int) -> Sample:
    """Return sample i of an evaluation. Raise UserError as `sample_of` does."""
    return sample_of(data.held_out_sample(i, seq=maker.length - 1), maker, steps, i, 0)


def sample_of(window: Window, maker: SampleMaker, steps: Steps, i: int, seed: int) -> Sample:
    """Return the named tensors of sample i. Raise UserError for a token beyond the model's vocabulary."""
    if maker.needed_ids and (highest := int(window.tokens.max())) >= maker.known_ids:
        raise UserError(
            f"the data has the token {highest:,}, the model has a vocabulary of {maker.known_ids:,}\n"
            f'declare Dim("vocab", {highest + 1}) or more, or give data of its tokenizer'
        )
    return steps.data_step(maker.reading(window), torch.from_numpy(window.tokens), i, seed)
