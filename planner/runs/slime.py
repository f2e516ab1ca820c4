"""slime and its fork miles: Megatron-LM's flags among those of reinforcement learning, with packed micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile

from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.dsl.quoting import shortened

from .megatron.flag import LARGEST_VALUE
from .megatron.parser import looks_like_flag, table
from .run import Devices, Note
from .slime_flags import VALUED, changes_no_step
from .words import Word

MARK = "--rollout-batch-size"
OF_SLIME = (
    MARK,
    "--actor-num-nodes",
    "--actor-num-gpus-per-node",
    "--n-samples-per-prompt",
    "--num-steps-per-rollout",
    "--max-tokens-per-gpu",
)
"""Flags of slime that are read."""


def is_slime(words: Sequence[Word]) -> bool:
    """Return whether a command's flags are those of slime."""
    return any(word.text == MARK for word in words)


def slime_devices(words: Sequence[Word], asked: int | None) -> Devices | None:
    """Return the devices that train, as the flags of the actor state them; None if they are not known but `asked`.

    Raise UserError if they are neither known nor asked for.
    """
    flags = _values(words)
    named = ("--actor-num-nodes", "--actor-num-gpus-per-node")
    if lacking := next((flags[name] for name in named if name in flags and flags[name].unknown), None):
        if asked:
            return None
        causes = " and ".join(f"{one.kind} {one.name}" for one in lacking.unknown)
        raise UserError(
            f"{lacking.origin}: the number of GPUs that train depends on {causes}\n"
            "give it with their kind: --gpus 8xH100"
        )
    nodes, each = _number(flags, "--actor-num-nodes"), _number(flags, "--actor-num-gpus-per-node")
    origin = flags["--actor-num-gpus-per-node"].origin if each else None
    return Devices((nodes or 1) * each, each, origin) if each else None


def slime_words(words: Sequence[Word], added: Sequence[Word]) -> tuple[Word, ...]:
    """Return the words of the training step. Raise UserError without a sequence length, which slime does not state.

    added: flags that the user adds. A packed micro-batch has as many sequences as `--max-tokens-per-gpu` holds.
    """
    flags = _values(words)
    given = {**flags, **_values(added)}
    seq = _number(given, "--seq-length")
    if seq is None:
        at = next(word for word in words if word.text == MARK)
        raise UserError(
            f"{at.origin}: slime packs its sequences, so the file states no sequence length\n"
            "give the usual number of tokens of prompt and response: --set seq-length=4096"
        )
    return (*_known(words), *_defaults(given, seq), *_batch(given, seq))


def _defaults(flags: Mapping[str, Word], seq: int) -> Iterator[Word]:
    """Yield what slime sets, or sets where the command does not."""
    text = "--use-distributed-optimizer"
    if "--moe-token-dispatcher-type" not in flags:
        text += " --moe-token-dispatcher-type alltoall"
    if "--max-position-embeddings" not in flags:
        text += f" --max-position-embeddings {seq}"
    if "--fp16" not in flags and "--bf16" not in flags:
        text += " --bf16"
    yield from (Word(word, flags[MARK].origin) for word in text.split())


def _batch(flags: Mapping[str, Word], seq: int) -> Iterator[Word]:
    tokens = _number(flags, "--max-tokens-per-gpu")
    if "--micro-batch-size" not in flags:
        at = flags.get("--max-tokens-per-gpu") or flags[MARK]
        held = (tokens or seq) * (_number(flags, "--context-parallel-size") or 1)
        yield Word("--micro-batch-size", at.origin)
        yield evolve(at, text=str(max(1, held // seq)), unknown=())
    if "--global-batch-size" not in flags:
        prompts, samples = _number(flags, MARK), _number(flags, "--n-samples-per-prompt") or 1
        steps = _number(flags, "--num-steps-per-rollout") or 1
        yield Word("--global-batch-size", flags[MARK].origin)
        yield evolve(flags[MARK], text=str(prompts * samples // steps)) if prompts else flags[MARK]


def repeated_flags(words: Sequence[Word]) -> Iterator[Note]:
    """Yield slime's own flags that stand again with another value, of which the last counts."""
    last: dict[str, str] = {}
    for position, word in enumerate(words):
        name = word.text.partition("=")[0]
        if name not in OF_SLIME:
            continue
        value = _values(words[position : position + 2])[name].text
        if last.setdefault(name, value) != value:
            yield Note(f"{name} stands again: its last value counts", word.origin)
        last[name] = value


def _known(words: Sequence[Word]) -> Iterator[Word]:
    """Yield the words without slime's flags that change no step; a flag that is not known is refused by a parser."""
    keep, before = True, ""
    for position, word in enumerate(words):
        is_value, before = before in OF_SLIME or before in VALUED, word.text
        if looks_like_flag(word.text) or (word.unknown and not word.text and not is_value):
            name, equals, value = word.text.partition("=")
            if not equals and position + 1 < len(words):
                value = words[position + 1].text
            keep = bool(word.unknown) or name in table() or not (name in OF_SLIME or changes_no_step(name, value))
        if keep:
            yield word


def _values(words: Sequence[Word]) -> dict[str, Word]:
    """Return the first value of each flag, or the flag itself if it has none."""
    found = {}
    for position, word in enumerate(words):
        name, equals, value = word.text.partition("=")
        if name.startswith("--"):
            after = list(takewhile(lambda one: not looks_like_flag(one.text), words[position + 1 : position + 2]))
            found[name] = evolve(word, text=value) if equals else (after or [word])[0]
    return found


def _number(flags: Mapping[str, Word], name: str) -> int | None:
    """Return the number that a flag states; None without it. Raise UserError for a value that is no number from 1."""
    word = flags.get(name)
    if word is None:
        return None
    if word.unknown:
        raise UserError(f"{word.origin}: {name} depends on {' and '.join(f'{u.kind} {u.name}' for u in word.unknown)}")
    if not word.text.isdecimal() or not 0 < int(word.text[:12]) <= LARGEST_VALUE:
        raise UserError(f"{word.origin}: {name} must be a whole number from 1, got {shortened(word.text, 20)}")
    return int(word.text)
