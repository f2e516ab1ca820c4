"""Generation of text from a trained model under a layout of its own, whatever layout it was trained under.

`generate` checks everything that can be checked without the weights, then starts the ranks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from attrs import evolve, frozen

from megaloom.dsl import UserError
from megaloom.dsl.facts.positions import longest
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Precision
from megaloom.runtime.data.tokenizer_source import opened_if_named
from megaloom.runtime.launch import launcher
from megaloom.runtime.megatron import device

device.prepare()

from megaloom.runtime.decoding.decoder import Decoder  # noqa: E402 (it imports megatron-core)
from megaloom.runtime.decoding.decoding_graph import (  # noqa: E402
    DecodingGraph,
    check_decoding,
    decoding_graph,
    first_after_mixing,
)
from megaloom.runtime.decoding.decoding_layout import Load, choose_layout, stage_bounds  # noqa: E402
from megaloom.runtime.megatron.process_groups import create_process_groups  # noqa: E402
from megaloom.runtime.training.artefact import opened  # noqa: E402

from .batches import Prompt, sampling_rank, write_batch  # noqa: E402
from .beam_search import BeamSearch  # noqa: E402
from .prompts import GivenPrompt, Mask, PromptReader  # noqa: E402
from .sampled_tokens import Completion, Ending, SampledTokens, Sampler  # noqa: E402
from .sampling import RowSampler  # noqa: E402
from .settings import GenerationSettings  # noqa: E402
from .text import PromptText, TextStream  # noqa: E402
from .trained_model import TrainedModel, open_trained  # noqa: E402

DEFAULT_NEW_TOKENS = 128
BATCH_SIZE = 16
"""Prompts that are written together."""


@frozen
class Generation:
    """One sequence that was written for a prompt."""

    prompt: str
    text: str  # without the prompt, special tokens and the text that ended it
    tokens: tuple[int, ...]  # without those of the prompt, with the one that ended it
    reason: str  # why it ended: "eos", "stop" or "length"
    score: float | None = None  # of beam search: log probability / length ** length_penalty


@frozen
class Job:
    """A generation as every rank needs it: model, layout, settings and encoded prompts."""

    trained: TrainedModel
    layout: Layout
    precision: Precision
    settings: GenerationSettings
    prompts: tuple[Prompt, ...]
    tokenizer: str
    batch_size: int
    eos: frozenset[int] = frozenset()
    forced: tuple[tuple[int, ...], ...] = ()  # the first token, then the last one; each may be empty
    stream: bool = False
    vocab: int | None = None  # number of ids that the tokenizer knows; None if nobody knows the tokenizer
    reads_bytes: bool = False  # for want of a tokenizer

    @property
    def notes(self) -> list[str]:
        """Return what the user should know before the text: damaged checkpoints, and a tokenizer that is missing."""
        notes = list(self.trained.checkpoint.notes) if self.trained.checkpoint else []
        if self.reads_bytes:
            notes.append(f"{self.trained.folder} has no tokenizer: text is read and written as bytes")
        return notes

    @property
    def batches(self) -> list[int]:
        """Return the number of the first prompt of each batch."""
        return list(range(0, len(self.prompts), self.batch_size))


def generate(
    run: str | Path,
    prompts: str | Sequence[GivenPrompt],
    settings: GenerationSettings | None = None,
    *,
    attention_mask: Mask | None = None,
    tp: int | None = None,
    pp: int | None = None,
    precision: Precision | None = None,
    tokenizer: str | None = None,
    tokenizer_type: str | None = None,
    chat: bool = False,
    add_bos: bool = False,
    batch_size: int = BATCH_SIZE,
    stream: bool = False,
    averaged: bool = False,
    timeout: float | None = None,
) -> tuple[Generation, ...]:
    """Return what a trained model writes for each prompt: `settings.num_return_sequences` sequences of each, in order.

    run: the folder of a run or a packed run, whose last checkpoint is used, or a Hugging Face folder. prompts: texts,
    or token ids. For an encoder-decoder they are what the encoder reads. attention_mask: for rows of ids that are
    padded to one length, 0 at padding, which is on the left, or on the right of what an encoder reads; the tokens are
    those that transformers generates with that mask. tp, pp: degrees of the layout; None takes the fewest devices on
    which the model fits. precision: of weights and activations; None is that of the training. tokenizer and
    tokenizer_type: as in `megaloom data`; None is that of the run. chat: a prompt is what the user says in the
    tokenizer's chat template. add_bos: begin each prompt with the token that begins texts, unless it has it already.
    batch_size: prompts that are written together. stream: print a single sequence while it is written.
    averaged: use the averaged weights of the checkpoint.

    Raise UserError for every problem that the user can solve.
    """
    given = [prompts] if isinstance(prompts, str) else list(prompts)
    named = (tokenizer, tokenizer_type)
    asked = Asked(tp, pp, precision, *named, chat, add_bos, batch_size, stream, averaged, attention_mask)
    return timed_generate(Path(run), given, settings or GenerationSettings(), asked, timeout=timeout)[0]


@frozen
class Asked:
    """Options of `generate`."""

    tp: int | None = None
    pp: int | None = None
    precision: Precision | None = None
    tokenizer: str | None = None
    tokenizer_type: str | None = None
    chat: bool = False
    add_bos: bool = False
    batch_size: int = BATCH_SIZE
    stream: bool = False
    averaged: bool = False
    attention_mask: Mask | None = None


def timed_generate(
    run: Path,
    prompts: Sequence[GivenPrompt],
    settings: GenerationSettings,
    asked: Asked,
    *,
    timeout: float | None = None,
) -> tuple[tuple[Generation, ...], float]:
    """Return what `generate` returns, and the seconds of writing: without the start of ranks and reading weights."""
    with opened(run) as folder, opened_if_named(asked.tokenizer, asked.tokenizer_type) as named:
        asked = evolve(asked, tokenizer=named)
        job = make_job(open_trained(folder, averaged=asked.averaged), prompts, settings, asked)
        launcher.check(job.layout.world)
        job.trained.check()
        for note in job.notes:
            print(note, file=sys.stderr)
        ranks = launcher.run(generate_on_rank, (job,), job.layout, timeout=timeout)
        written, seconds = next(found for found in ranks if found is not None)
        return generations(job, prompts, written), seconds


def make_job(trained: TrainedModel, prompts: Sequence[GivenPrompt], settings: GenerationSettings, asked: Asked) -> Job:
    """Return the job of all ranks. Raise UserError for a model, prompts or options that cannot be generated from."""
    graph = decoding_graph(trained.graph)
    check_decoding(graph)
    text = PromptText.load(trained.tokenizer if asked.tokenizer is None else asked.tokenizer)
    known = asked.tokenizer is not None or trained.has_tokenizer
    reads_text = any(isinstance(prompt, str) for prompt in prompts)
    if reads_text and not known and trained.is_run:
        raise UserError(
            f"{trained.folder} was trained on a dataset that came without a tokenizer, so a text has no tokens\n"
            "give the tokenizer of the data with --tokenizer"
        )
    encoded = PromptReader(text, trained, graph, asked.chat, asked.add_bos).read(prompts, asked.attention_mask)
    if asked.batch_size < 1:
        raise UserError(f"--batch-size must be at least 1, got {asked.batch_size}")
    settings = with_length(settings, encoded, graph)
    load = Load(min(asked.batch_size, len(prompts)) * settings.copies, _positions(encoded, settings))
    precision = trained.precision if asked.precision is None else asked.precision
    return Job(
        trained,
        choose_layout(graph, load, precision, asked.tp, asked.pp),
        precision,
        settings,
        encoded,
        text.name,
        asked.batch_size,
        eos=frozenset(_eos(settings, trained, text, graph.logits.shape["vocab"].known)),
        forced=(trained.special("forced_bos_token_id"), trained.special("forced_eos_token_id")) if graph.source else (),
        stream=asked.stream and len(prompts) * settings.copies == 1,
        vocab=text.tokenizer.ids.vocab if known or reads_text else None,
        reads_bytes=reads_text and not known,
    )


def generations(job: Job, prompts: Sequence[GivenPrompt], written: Sequence[Completion]) -> tuple[Generation, ...]:
    """Return sequences with their texts."""
    text, stop = PromptText.load(job.tokenizer), job.settings.stop_strings
    encoded = zip(prompts, job.prompts, strict=True)
    shown = [given if isinstance(given, str) else text.decode(p.source or p.tokens) for given, p in encoded]
    return tuple(
        Generation(shown[x.prompt], text.written(_without_end(x), stop), x.tokens, x.reason, x.score) for x in written
    )


def generate_on_rank(job: Job) -> tuple[list[Completion], float] | None:
    """Return the sequences, ordered by prompt and number, and the seconds of writing them.

    Ranks that sample no tokens return None.
    """
    return write(job, decoder_of(job))


def decoder_of(job: Job) -> Decoder:
    """Return this rank's part of the model, with its weights. Every rank calls it."""
    graph = decoding_graph(job.trained.graph)
    groups, bounds = create_process_groups(job.layout), stage_bounds(graph, job.layout)
    return Decoder.build(graph, bounds, first_after_mixing(graph), groups, job.precision, job.trained.weights())


def write(job: Job, decoder: Decoder) -> tuple[list[Completion], float] | None:
    """Return the sequences and the seconds of writing them, as `generate_on_rank`. Every rank calls it."""
    rank, source, text = torch.distributed.get_rank(), sampling_rank(decoder), PromptText.load(job.tokenizer)
    ending, found = Ending(job.settings, job.eos, text.decode, job.forced, job.vocab), list[Completion]()
    stream = TextStream(text, job.settings.stop_strings, _print) if job.stream and rank == 0 else None

    def show(sampled: SampledTokens) -> None:
        if stream and sampled.tokens[0] not in job.eos:
            stream.add(sampled.tokens[0])

    start = time.monotonic()
    with torch.compiler.set_stance("force_eager"):  # compiled kernels are for one length
        for first in job.batches:
            part = job.prompts[first : first + job.batch_size]
            sampler = _sampler(job, ending, part, first)
            write_batch(decoder, part, job.settings.copies, sampler, source, show)
            found += [evolve(x, prompt=first + x.prompt) for x in sampler.finished]
    if stream:
        stream.end()
        _print("\n")
    if rank != source:
        return None
    return sorted(found, key=lambda x: (x.prompt, x.number)), time.monotonic() - start


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _sampler(job: Job, ending: Ending, prompts: Sequence[Prompt], first: int) -> Sampler:
    """Return the sampler of a batch."""
    tokens = [prompt.tokens for prompt in prompts]
    return BeamSearch.of(ending, tokens) if job.settings.num_beams > 1 else RowSampler.of(ending, tokens, first)


def _without_end(x: Completion) -> tuple[int, ...]:
    """Return the tokens of a sequence without the one that ended it."""
    return x.tokens[:-1] if x.reason == "eos" else x.tokens


def with_length(settings: GenerationSettings, prompts: Sequence[Prompt], graph: DecodingGraph) -> GenerationSettings:
    """Return settings whose number of tokens the model has positions for. Raise UserError if it has none."""
    rows, name = longest(graph.graph), graph.graph.name
    prompt, source = (max(len(x) for x in each) for each in zip(*((p.tokens, p.source or ()) for p in prompts)))  # noqa: B905
    sources = [rows[d.name] for n in graph.graph.nodes if n.name == graph.source for d in n.shape if d.name in rows]
    if sources and source > min(sources):
        raise UserError(f"a prompt has {source:,} tokens, but the encoder of {name} has {min(sources):,} positions")
    free = rows.get(graph.sequence.name, prompt + (settings.max_new_tokens or DEFAULT_NEW_TOKENS)) - prompt
    if free < 1:
        raise UserError(
            f"a prompt has {prompt:,} tokens, but {name} has {prompt + free:,} positions\ngive a shorter prompt"
        )
    if settings.max_new_tokens is not None and settings.max_new_tokens > free:
        raise UserError(
            f"a prompt of {prompt:,} tokens and --max-new-tokens {settings.max_new_tokens} are more than the "
            f"{prompt + free:,} positions of {name}\nuse --max-new-tokens {free} or less"
        )
    return evolve(settings, max_new_tokens=settings.max_new_tokens or min(DEFAULT_NEW_TOKENS, free))


def _positions(prompts: Sequence[Prompt], settings: GenerationSettings) -> int:
    """Return the most positions of a row."""
    return max(max(len(p.tokens), len(p.source or ())) for p in prompts) + (settings.max_new_tokens or 0)


def _eos(settings: GenerationSettings, trained: TrainedModel, text: PromptText, vocab: int) -> tuple[int, ...]:
    """Return the tokens that end a sequence."""
    if settings.eos_token_id is not None:
        return tuple(text.token(str(name), vocab) for name in settings.eos_token_id)
    own = text.tokenizer.ids.eos
    return trained.special("eos_token_id") or (() if own is None else (own,))
