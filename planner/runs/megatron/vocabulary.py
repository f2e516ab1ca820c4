"""The vocabulary of a run: as the arguments state it, or as the tokenizer that they name is known to have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from megaloom.planner.runs.words import Word

from .parser import Arguments
from .refusal import refuse_run

GPT2 = 50_257  # tokens of GPT-2's merges
TIKTOKEN = 2**17  # of Megatron-LM's TikTokenizer without --vocab-size
_TOKENIZERS = """
BertWordPieceLowerCase BertWordPieceCase GPT2BPETokenizer SentencePieceTokenizer GPTSentencePieceTokenizer
HuggingFaceTokenizer Llama2Tokenizer TikTokenizer MultimodalTokenizer NullTokenizer NullMultimodalTokenizer SFTTokenizer
PretrainedFromHF
"""
TOKENIZERS = frozenset(_TOKENIZERS.split())
"""Tokenizers of Megatron-LM's releases and of BigScience's fork, of which --vocab-size is the number of tokens."""
# Tokens of the tokenizers of published models on huggingface.co, added ones included, as len(tokenizer) counts them.
HUB: Mapping[str, int] = MappingProxyType(
    {
        "gpt2": GPT2,
        "openai-community/gpt2": GPT2,
        "meta-llama/Llama-2-7b-hf": 32_000,
        "meta-llama/Llama-2-13b-hf": 32_000,
        "meta-llama/Llama-2-70b-hf": 32_000,
        "meta-llama/Meta-Llama-3-8B": 128_256,
        "meta-llama/Meta-Llama-3-70B": 128_256,
        "meta-llama/Llama-3.1-8B": 128_256,
        "meta-llama/Llama-3.1-70B": 128_256,
        "meta-llama/Llama-3.1-405B": 128_256,
        "meta-llama/Meta-Llama-3.1-8B": 128_256,
        "meta-llama/Meta-Llama-3.1-70B": 128_256,
        "meta-llama/Meta-Llama-3.1-405B": 128_256,
        "meta-llama/Llama-3.2-1B": 128_256,
        "meta-llama/Llama-3.2-3B": 128_256,
        "mistralai/Mistral-7B-v0.1": 32_000,
        "mistralai/Mixtral-8x7B-v0.1": 32_000,
    }
)


def _of_gpt2(file: Sequence[Word]) -> bool:
    """Return whether a file of words or merges may be GPT-2's: its path says so, or is not known."""
    return all(word.unknown or not word.text or "gpt2" in word.text.lower().replace("-", "") for word in file)


def vocabulary(a: Arguments, stated: int | None) -> tuple[int, str]:
    """Return the tokens of the vocabulary before padding, and where the number is from; empty if the file states it.

    stated: the option --vocab. Raise UserError that asks for it where it cannot be known.
    """
    if stated is not None:
        return stated, "--vocab"
    if padded := a["padded_vocab_size"] or a["pad_vocab_size_to"]:
        return padded, ""
    kind, size, name = a["tokenizer_type"], a["vocab_size"], a["tokenizer_model"]
    files = [a.given[dest].values for dest in ("vocab_file", "merge_file") if dest in a.given]
    if (kind == "GPT2BPETokenizer" or (kind is None and size is None and files)) and all(map(_of_gpt2, files)):
        return GPT2, "the merges of GPT-2"
    if kind == "TikTokenizer":
        return size or TIKTOKEN, "" if size else "TikTokenizer's own number"
    if size is not None:
        strange = kind is not None and kind not in TOKENIZERS
        return size + (
            kind == "NullTokenizer"
        ), "the file's own number, of a tokenizer that is not known" if strange else ""
    if kind == "HuggingFaceTokenizer" and name in HUB:
        return HUB[name], f"the tokenizer of {name}"
    which = f"the vocabulary of {kind}" if kind else "the vocabulary"
    refuse_run(
        a,
        f"{which} is not stated",
        "tokenizer_model",
        "tokenizer_type",
        instead="give its tokens before padding: --vocab N",
    )
