"""A split of the data of a run: training, validation or test. Sample i is a pure function of (seed, i).

It needs no state, no index and no layout, so a run resumes from its count of consumed samples on any number of devices
and with any batch size. Each epoch visits every window of the text once, in an order of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import Enum
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
from attrs import frozen

from megaloom.dsl.errors import UserError

from .indexed import IndexedDataset, Ints
from .labels import IGNORED
from .order import permuted, stable_hash
from .split import TokenRange

BLEND_PERIOD = 1000
"""Samples after which a blend has exactly the shares of its datasets, which are therefore multiples of 1/1000."""
COUNTED_TOKENS = 2**24
"""Most tokens whose frequencies are counted."""


@frozen(eq=False)
class Window:
    """Consecutive tokens of the data: a sample is made of them."""

    tokens: Ints  # [length]
    documents: Ints  # [length], the document of each token, counted from the first one's
    counted: npt.NDArray[np.bool_] | None = None  # [length], whether training predicts the token; None: all of them
    labels: Ints | None = None  # of a document or a piece of one: its class [1], or one for each token [length]
    target: Ints | None = None  # of a pair: the tokens of its other text
    sentences: Ints | None = None  # the tokens at which a sentence begins inside its document


class RowUnit(Enum):
    """The part of a document that a sample has, if it has one document alone."""

    DOCUMENT = "all of it"
    PIECE = "a piece with a labelled token"


@frozen
class DataSplit:
    """A split of the data: ranges of one or several datasets.

    With weights, sample i comes from dataset k with the share weights[k]. Without, an epoch has every window of all
    ranges once. whole_documents: samples have whole documents, padded at their end, instead of cuts of the text.
    rows: a sample has one document alone.
    """

    name: str
    ranges: tuple[TokenRange, ...]
    weights: tuple[float, ...] | None = None
    whole_documents: bool = False
    padding: int = 0  # id of the tokens after the last whole document
    rows: RowUnit | None = None

    @property
    def count(self) -> int:
        """Return the number of tokens."""
        return sum(r.count for r in self.ranges)

    def windows(self, seq: int) -> int:
        """Return the number of samples in an epoch. Raise UserError if the text is too short for one."""
        counts = self._windows(seq)
        if not sum(counts) or (self.weights and not all(counts)):
            short = next((r for r, n in zip(self.ranges, counts, strict=True) if not n), self.ranges[0])
            where = f" ({short.dataset.prefix})" if len(self.ranges) > 1 else ""
            if self.whole_documents and short.count:
                raise UserError(
                    f"no conversation of the {self.name} data{where} has an answer within --seq {seq:,} tokens\n"
                    "give a larger --seq, or shorter conversations"
                )
            if self.rows and short.count:
                what = "labelled token" if self.rows is RowUnit.PIECE else "document"
                raise UserError(f"the {self.name} data{where} have no {what}\ngive more data, or another --split")
            raise UserError(
                f"the {self.name} text has {short.count:,} tokens, too few for --seq {seq:,}{where}\n"
                f"give at least {2 * seq:,} tokens of text, or a smaller --seq"
            )
        return sum(counts)

    def sample(self, i: int, *, seq: int, seed: int) -> Window:
        """Return sample i of training, seq + 1 tokens.

        Order and offset of the windows differ between epochs.
        """
        counts = self._windows(seq)
        if self.weights:
            k, i = self._blended(i)
            counts = [count if k == each else 0 for each, count in enumerate(counts)]
        epoch, index = divmod(i, sum(counts))
        key = stable_hash(seed, epoch)
        k, index = _located(permuted(index, sum(counts), key), counts)
        if self.rows:
            return self._row(k, index, seq)
        if self.whole_documents:
            return self._packed(k, index, seq)
        return self._window(k, key % seq + seq * index, seq)

    def held_out_samples(self, seq: int) -> int:
        """Return the number of samples of an evaluation that reads all of the text once."""
        return sum(self._held_out(seq))

    def held_out_sample(self, i: int, *, seq: int) -> Window:
        """Return sample i of an evaluation, seq + 1 tokens.

        All samples together predict each token once, except the first one of each dataset and at most seq - 1 tokens at
        its end. The first samples come from everywhere in the text.
        """
        counts = self._held_out(seq)
        k, index = _located(permuted(i, sum(counts), 0), counts)
        if self.rows:
            return self._row(k, index, seq)
        return self._packed(k, index, seq) if self.whole_documents else self._window(k, seq * index, seq)

    def _windows(self, seq: int) -> list[int]:
        if self.whole_documents or self.rows:
            return self._held_out(seq)
        return [max(0, r.count // seq - 1) for r in self.ranges]

    def _held_out(self, seq: int) -> list[int]:
        if self.rows is RowUnit.PIECE:
            return [len(labelled_pieces(r.dataset, r.start, r.stop, seq)) for r in self.ranges]
        if self.rows:
            return [last - first for first, last in map(_documents_in, self.ranges)]
        if self.whole_documents:
            return [len(packs(r.dataset, r.start, r.stop, seq + 1)) for r in self.ranges]
        return [max(0, r.count - 1) // seq for r in self.ranges]

    def _window(self, k: int, start: int, seq: int) -> Window:
        """Return the tokens [start, start + seq + 1) of range k."""
        span, dataset = self.ranges[k], self.ranges[k].dataset
        first, stop = span.start + start, span.start + start + seq + 1
        counted = None if dataset.mask is None else np.array(dataset.mask[first:stop])
        sentences = dataset.inner_starts(first, stop)
        tokens = dataset.array[first:stop].astype(np.int64)
        return Window(tokens, dataset.documents_of(first, stop), counted, sentences=sentences)

    def _row(self, k: int, index: int, seq: int) -> Window:
        """Return document number `index` of range k, or the piece of this number, of `seq` tokens at most."""
        dataset = self.ranges[k].dataset
        if self.rows is RowUnit.PIECE:
            assert dataset.labels is not None
            start, stop = labelled_pieces(dataset, self.ranges[k].start, self.ranges[k].stop, seq)[index].tolist()
            labels = dataset.labels.array[start:stop].astype(np.int64)
            return Window(dataset.array[start:stop].astype(np.int64), np.zeros(stop - start, np.int64), None, labels)
        number = _documents_in(self.ranges[k])[0] + index
        tokens, beside = (
            dataset.document(number),
            [None if d is None else d.document(number).astype(np.int64) for d in (dataset.labels, dataset.target)],
        )
        return Window(tokens.astype(np.int64), np.zeros(len(tokens), np.int64), None, *beside)

    def _packed(self, k: int, index: int, seq: int) -> Window:
        """Return whole documents of range k and padding: pack number `index`. A longer document is cut at its end."""
        span, dataset = self.ranges[k], self.ranges[k].dataset
        first, last = packs(dataset, span.start, span.stop, seq + 1)[index]
        start, stop = dataset.start(int(first)), dataset.start(int(last))
        length = min(stop - start, seq + 1)
        tokens, documents = np.full(seq + 1, self.padding), np.zeros(seq + 1, np.int64)
        counted = np.zeros(seq + 1, np.bool_)
        tokens[:length] = dataset.array[start : start + length]
        documents[:length] = dataset.documents_of(start, start + length)
        documents[length:] = documents[length - 1] + 1
        counted[:length] = True if dataset.mask is None else dataset.mask[start : start + length]
        counted[0] = False
        counted[1:] &= documents[1:] == documents[:-1]  # the first token of a document has nothing before it
        return Window(tokens, documents, counted)

    @cached_property
    def _period(self) -> tuple[Ints, Ints, Ints]:
        """Return dataset and number in it of each sample of a period of a blend, and the samples of each dataset."""
        assert self.weights
        shares = np.array(self.weights) / sum(self.weights) * BLEND_PERIOD
        counts = np.maximum(shares.astype(np.int64), 1)
        while (left := BLEND_PERIOD - int(counts.sum())) != 0:
            step = 1 if left > 0 else -1
            counts[np.argmax(step * (shares - counts) - 1e9 * (counts + step < 1))] += step
        times = np.concatenate([(np.arange(c) + 0.5) / c for c in counts])
        order = np.argsort(times, kind="stable")
        return (
            np.repeat(np.arange(len(counts)), counts)[order],
            np.concatenate([np.arange(c) for c in counts])[order],
            counts,
        )

    def _blended(self, i: int) -> tuple[int, int]:
        """Return dataset and number in the dataset of sample i of a blend."""
        datasets, numbers, counts = self._period
        period, at = divmod(i, BLEND_PERIOD)
        k = int(datasets[at])
        return k, period * int(counts[k]) + int(numbers[at])

    def unigram_entropy(self) -> float:
        """Return the entropy of the token frequencies, in nats per token: the best loss without any context.

        It is that of the first tokens of each range, COUNTED_TOKENS at most.
        """
        most = COUNTED_TOKENS // len(self.ranges)
        counted = np.concatenate([r.dataset.array[r.start : min(r.stop, r.start + most)] for r in self.ranges])
        share = np.bincount(counted) / len(counted)
        share = share[share > 0]
        return float(-(share * np.log(share)).sum())


def _located(index: int, counts: list[int]) -> tuple[int, int]:
    """Return the range that has window number `index` of all ranges, and its number there."""
    for k, count in enumerate(counts):
        if index < count:
            return k, index
        index -= count
    raise IndexError(index)


def _documents_in(span: TokenRange) -> tuple[int, int]:
    """Return the first document that begins in a range, and the one after the last."""
    offsets, size = span.dataset.offsets, span.dataset.token_nbytes
    return bisect_left(offsets, span.start * size), bisect_left(offsets, span.stop * size)


@lru_cache(maxsize=64)
def labelled_pieces(dataset: IndexedDataset, start: int, stop: int, capacity: int) -> Ints:
    """Return first token and end of each piece of documents in the tokens [start, stop), [pieces, 2].

    A document has as many pieces of at most `capacity` tokens as it needs. Pieces without a labelled token are left
    out.
    """
    assert dataset.labels is not None
    if stop == start:
        return np.zeros((0, 2), np.int64)
    first, last = dataset.document_at(start), dataset.document_at(stop - 1)
    borders = np.array(dataset.offsets[first + 1 : last + 1], np.int64) // dataset.token_nbytes
    begins = np.concatenate([[start], borders])
    counts = -(-np.diff(np.append(begins, stop)) // capacity)
    of = np.repeat(np.arange(len(begins)), counts)
    starts = begins[of] + capacity * (np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts))
    stops = np.minimum(starts + capacity, np.append(begins, stop)[of + 1])
    labelled = np.concatenate([[0], np.cumsum(np.array(dataset.labels.array[start:stop]) != IGNORED)])
    return np.stack([starts, stops], axis=1)[labelled[stops - start] > labelled[starts - start]]


@lru_cache(maxsize=64)
def packs(dataset: IndexedDataset, start: int, stop: int, capacity: int) -> Ints:
    """Return the first document of each pack and the one after its last, [packs, 2].

    Packs of which training predicts no token are left out, such as one whose long prompt fills it.
    """
    borders = packed_documents(dataset, start, stop, capacity)
    pairs = np.stack([borders[:-1], borders[1:]], axis=1)
    if dataset.mask is None or not len(pairs):
        return pairs
    starts = np.array(dataset.offsets[borders[0] : borders[-1]]) // dataset.token_nbytes - start
    counted = np.array(dataset.mask[start:stop])
    counted[starts] = False  # nothing is before the first token of a document
    totals = np.concatenate([[0], np.cumsum(counted)])
    begins = np.append(starts, stop - start)[borders - borders[0]]
    ends = np.minimum(begins[1:], begins[:-1] + capacity)
    return pairs[totals[ends] > totals[begins[:-1]]]


@lru_cache(maxsize=64)
def packed_documents(dataset: IndexedDataset, start: int, stop: int, capacity: int) -> Ints:
    """Return the borders of packs of whole documents with at most `capacity` tokens, [packs + 1].

    Pack p has the documents borders[p] to borders[p + 1] - 1 of the tokens [start, stop): as many as fit, in order. A
    longer document is alone in its pack.
    """
    if stop == start:
        return np.zeros(1, np.int64)
    first, last = dataset.document_at(start), dataset.document_at(stop - 1) + 1
    starts = np.append(np.array(dataset.offsets[first:last]) // dataset.token_nbytes, stop)
    borders = [first]
    while borders[-1] < last:
        at = borders[-1] - first
        end = int(np.searchsorted(starts, starts[at] + capacity, "right")) - 1
        borders.append(first + max(end, at + 1))
    return np.array(borders)
