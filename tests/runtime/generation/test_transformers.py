"""Sequences equal those of transformers' `generate`: greedy, beam search, padded rows; several families."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen

from megaloom.runtime.generation.settings import GenerationSettings
from megaloom.runtime.launch import launcher
from tests.support.limits import LIMIT
from tests.support.models.hugging_face import built, transformers

FAMILIES = ("llama", "gpt2", "gemma3", "mixtral", "deepseek-v3", "gpt-oss", "mamba2", "qwen3-next", "t5", "bart")
PROMPTS = ((5, 17, 30), (8, 44, 2, 51, 9, 12, 33), (20,))
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "repetition": {"repetition_penalty": 1.4},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "long beams": {"num_beams": 4, "length_penalty": 2.0, "early_stopping": "never"},
    "early beams": {"num_beams": 2, "length_penalty": -1.0, "early_stopping": True, "repetition_penalty": 1.2},
}
PADDED = "greedy, padded rows with a mask"
EOS, START, LENGTH = tuple(range(3, 60, 6)), 3, 7


@frozen
class Expected:
    """A folder that transformers has written, and the sequences that it generates by setting."""

    folder: Path
    sequences: dict[str, list[tuple[int, ...]]]


def expected_of(name: str, folder: Path) -> Expected:
    torch.manual_seed(0)
    theirs = built(name)
    theirs.generation_config = transformers.GenerationConfig(
        eos_token_id=list(EOS), pad_token_id=0, decoder_start_token_id=START, max_new_tokens=LENGTH
    )
    theirs.save_pretrained(folder)
    sequences = {setting: sequences_of(theirs, options) for setting, options in SETTINGS.items()}
    return Expected(folder, {**sequences, PADDED: padded_sequences_of(theirs)})


def padded(right: bool) -> tuple[list[list[int]], list[list[int]]]:
    """Return the prompts padded to one length, and their mask."""
    longest = max(map(len, PROMPTS))
    pads = [[0] * (longest - len(p)) for p in PROMPTS]
    ones = [[1] * len(p) for p in PROMPTS]
    if right:
        return [[*p, *x] for p, x in zip(PROMPTS, pads, strict=True)], [a + b for a, b in zip(ones, pads, strict=True)]
    return [[*x, *p] for p, x in zip(PROMPTS, pads, strict=True)], [b + a for a, b in zip(ones, pads, strict=True)]


def padded_sequences_of(theirs: Any) -> list[tuple[int, ...]]:
    """Return the tokens that transformers generates for the padded prompts together, with their mask."""
    encodes = theirs.config.is_encoder_decoder
    rows, mask = map(torch.tensor, padded(right=encodes))
    written = theirs.generate(rows, attention_mask=mask)[:, 1 if encodes else rows.shape[1] :].tolist()
    return [tuple(ids[: next((i + 1 for i, token in enumerate(ids) if token in EOS), len(ids))]) for ids in written]


def sequences_of(theirs: Any, options: dict[str, Any]) -> list[tuple[int, ...]]:
    """Return the tokens that transformers generates for each prompt by itself, up to the token that ends it."""
    out = []
    for prompt in PROMPTS:
        begin = 1 if theirs.config.is_encoder_decoder else len(prompt)
        for ids in theirs.generate(torch.tensor([prompt]), **options)[:, begin:].tolist():
            end = next((i + 1 for i, token in enumerate(ids) if token in EOS), len(ids))
            out.append(tuple(ids[:end]))
    return out


def written_on_rank(folders: Sequence[Path], tp: int, pp: int) -> list[dict[str, list[tuple[int, ...]]] | None]:
    """On each rank: the sequences of all folders and settings, on the rank that has them."""
    from megatron.core import parallel_state

    from megaloom.runtime.generation.generate import Asked, generate_on_rank, make_job
    from megaloom.runtime.generation.trained_model import open_trained

    out = []
    for folder in folders:
        found = {}
        rows, mask = padded(right=folder.name in ("t5", "bart"))
        for setting, options in {**SETTINGS, PADDED: {}}.items():
            given, asked = GenerationSettings(max_new_tokens=LENGTH, **options), Asked(tp, pp, batch_size=2)
            prompts: Sequence[Sequence[int]] = PROMPTS
            if setting == PADDED:
                prompts, asked = rows, evolve(asked, attention_mask=mask)
            job = make_job(open_trained(folder), prompts, given, asked)
            found[setting] = generate_on_rank(job)
            parallel_state.destroy_model_parallel()
        written = {name: [x.tokens for x in each[0]] for name, each in found.items() if each is not None}
        out.append(written or None)
    return out


def test_sequences_are_those_of_transformers(tmp_path: Path) -> None:
    cases = [expected_of(name, tmp_path / name) for name in FAMILIES]
    (found,) = launcher.run(written_on_rank, ([it.folder for it in cases], 1, 1), 1, timeout=LIMIT)
    for it, ours in zip(cases, found, strict=True):
        assert ours == it.sequences, it.folder.name


def test_a_layout_writes_the_sequences_of_transformers(tmp_path: Path) -> None:
    cases = [expected_of(name, tmp_path / name) for name in ("llama", "t5")]
    ranks = launcher.run(written_on_rank, ([it.folder for it in cases], 2, 2), 4, timeout=LIMIT)
    assert list(ranks[2]) == [it.sequences for it in cases]
    assert ranks[0] == ranks[1] == ranks[3] == [None, None]
