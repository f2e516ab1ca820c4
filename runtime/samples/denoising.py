"""Targets of masked tokens (BERT), of spans that sentinels replace (T5) or masks (BART), and of pairs."""

from __future__ import annotations

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from megaloom.runtime.data.token_ids import BYTE_IDS, Template, TokenIds

from .padded import padded_text

MASKED = 0.15  # share of the tokens to predict (Devlin et al., arXiv:1810.04805, section 3.1)
REPLACED, RANDOM = 0.8, 0.1  # of these, the share replaced by the mask's id, and by a random id
INFILLED = 0.3  # share of the tokens that masks replace in BART's text infilling (arXiv:1910.13461, section 5.1)
NOISE, SPAN = 0.15, 3  # share of the tokens in removed spans, and their mean length (Raffel et al., arXiv:1910.10683)


def masked(
    text: Tensor, random: np.random.Generator, vocab: int, ids: TokenIds = BYTE_IDS, is_text: Tensor | None = None
) -> dict[str, Tensor]:
    """Return tokens with some of them masked, the labels before, and a mask of those to predict: at least one.

    is_text: False at special tokens and padding, which are never masked; None: there are none. The id of the mask is
    the tokenizer's, or the first one after its vocabulary. Source: Devlin et al., arXiv:1810.04805, section 3.1.
    """
    seq = len(text)
    chosen = random.random(seq) < MASKED
    if is_text is None or bool(is_text.all()):
        chosen[random.integers(seq)] = True
    else:
        chosen &= is_text.numpy()
        chosen[random.choice(np.flatnonzero(is_text.numpy()))] = True
    fate, others = random.random(seq), random.integers(min(vocab, ids.vocab), size=seq)
    tokens = text.numpy().copy()
    tokens[chosen & (fate < REPLACED)] = min(ids.vocab if ids.mask is None else ids.mask, vocab - 1)
    swapped = chosen & (fate >= REPLACED) & (fate < REPLACED + RANDOM)
    tokens[swapped] = others[swapped]
    return {"tokens": torch.from_numpy(tokens), "labels": text.clone(), "mask": torch.from_numpy(chosen)}


@frozen
class TargetIds:
    """Ids of source and target: what the decoder reads first, what fills a target, what ends both, and sentinels."""

    start: int = 0
    padding: int = 0
    end: int | None = None
    sentinels: tuple[int, ...] = ()


def text_length(source: int, *, ends: bool) -> int:
    """Return the least number of tokens whose source, after spans are removed, fills `source` positions.

    ends: the source ends with a token of its own.
    """
    length = source - ends
    while length - noise_of(length)[0] + noise_of(length)[1] + ends < source:
        length += 1
    return length


def noise_of(length: int) -> tuple[int, int]:
    """Return the number of tokens in removed spans, and the number of spans."""
    tokens = max(1, round(length * NOISE))
    return tokens, max(1, round(tokens / SPAN))


def sentinels_of(length: int) -> int:
    """Return the number of sentinels for a text: one for each span, and one after the last."""
    return noise_of(length)[1] + 1


def spans(
    text: Tensor, random: np.random.Generator, vocab: int, seq: int, source_length: int, ids: TargetIds
) -> dict[str, Tensor]:
    """Return the source with spans replaced by sentinels, and the target that has each sentinel and its span.

    The source has `source_length` tokens, of which the last is `ids.end`. The target ends with one more sentinel and
    `ids.end`. If the tokenizer has too few sentinels, sentinel k is id vocab - 1 - k. tokens: the target shifted by
    one, after `ids.start`. mask: the length of the target. Source: Raffel et al., arXiv:1910.10683, section 3.1.4, and
    transformers' run_t5_mlm_flax.py, which ends both sequences.
    """
    length, (noise, count), wanted = len(text), noise_of(len(text)), sentinels_of(len(text))
    sentinels = ids.sentinels if len(ids.sentinels) >= wanted else [max(vocab - 1 - k, 0) for k in range(wanted)]
    lengths, gaps = _cut(noise, count, random), _cut(length - noise, count, random)
    end: list[int] = [] if ids.end is None else [ids.end]
    source, target, at = [], [], 0
    for gap, span, sentinel in zip(gaps, lengths, sentinels, strict=False):
        source += [*text[at : at + gap].tolist(), sentinel]
        target += [sentinel, *text[at + gap : at + gap + span].tolist()]
        at += gap + span
    source = source[: source_length - len(end)] + end
    target = [*target, sentinels[count], *end][:seq]
    labels = torch.tensor(target + [ids.padding] * (seq - len(target)))
    return {
        "source": torch.tensor(source),
        "tokens": torch.cat([torch.tensor([ids.start]), labels[:-1]]),
        "labels": labels,
        "mask": torch.arange(seq) < len(target),
        "documents": torch.zeros(seq, dtype=torch.int64),
        "source_documents": torch.zeros(len(source), dtype=torch.int64),
    }


def infilled(
    text: Tensor,
    random: np.random.Generator,
    vocab: int,
    seq: int,
    source_length: int,
    ids: TokenIds,
    target: TargetIds,
) -> dict[str, Tensor]:
    """Return the source, in which spans of the text are each replaced by one mask, and the text itself as target.

    The lengths of the spans are Poisson distributed; one of length 0 inserts a mask. Special tokens are around source
    and target. Source: Lewis et al., arXiv:1910.13461, section 2.2.
    """
    length, lengths, removed = len(text), list[int](), round(len(text) * INFILLED)
    while sum(lengths) < removed:
        lengths.append(min(int(random.poisson(SPAN)), removed - sum(lengths)))
    kept = length - removed
    places = np.sort(random.choice(kept + 1, min(len(lengths), kept + 1), replace=False)).tolist()
    mask, source, at = min(ids.vocab if ids.mask is None else ids.mask, vocab - 1), list[int](), 0
    for before, gap, span in zip([0, *places], places, lengths, strict=False):
        source += [*text[at : at + gap - before].tolist(), mask]
        at += gap - before + span
    source += text[at:].tolist()
    return paired(torch.tensor(source, dtype=torch.int64), text, seq, source_length, ids, target)


def paired(
    source: Tensor, text: Tensor, seq: int, source_length: int, ids: TokenIds, target: TargetIds
) -> dict[str, Tensor]:
    """Return a source and its target with their special tokens, padded; tokens: the target after `target.start`.

    Special tokens are those of the tokenizer's template or, without one, its end-of-text token at the end.
    """
    if not ids.template.count and ids.eos is not None:
        ids = evolve(ids, template=Template(after=(ids.eos,)))
    read = padded_text(source, ids, source_length, padding=target.padding)
    written = padded_text(text, ids, seq, padding=target.padding)
    return {
        "source": read.tokens,
        "tokens": torch.cat([torch.tensor([target.start]), written.tokens[:-1]]),
        "labels": written.tokens,
        "mask": ~written.is_padding,
        "documents": torch.zeros(seq, dtype=torch.int64),  # padding of the decoder comes last: nothing reads it
        "source_documents": read.documents,
    }


def _cut(total: int, count: int, random: np.random.Generator) -> list[int]:
    """Return `count` random lengths of at least 1 that add up to `total`."""
    cuts = np.sort(random.choice(total - 1, count - 1, replace=False)) + 1 if count > 1 else np.zeros(0, int)
    lengths: list[int] = np.diff(np.concatenate([[0], cuts, [total]])).tolist()
    return lengths
