"""Generation as Accelerate's `megatron_generate` has it, over two tensor-parallel ranks, beside transformers.

A small GPT-2 with random weights has its tokenizer as users of Megatron-LM have it: vocab.json and merges.txt. Greedy
search and 20 beams write the tokens of transformers' `generate`. Tokens that are drawn with top-k and top-p are among
those that transformers leaves, and as probable on average as they should be.

    python -m megaloom.examples.scripts.generation    # exit code 1 if a number differs
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Tokenizer, logging
from transformers.generation import logits_process

from megaloom.runtime import GenerationSettings, generate

PROMPTS = (
    "Are you human?",
    "The purpose of life is",
    "The arsenal was constructed at the request of",
    "How are you doing these days?",
)
NEW_TOKENS, SAMPLES, VOCAB = 16, 16, 400
END = "<|endoftext|>"
SEARCHED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, add_bos": {"add_bos": True},
    "greedy, three end tokens": {"eos_token_id": (END, "&", "ĠNone")},
    "20 beams, length penalty 1.5": {"num_beams": 20, "length_penalty": 1.5},
}
DRAWN: dict[str, dict[str, Any]] = {
    "top-k 50, temperature 0.9": {"top_k": 50, "temperature": 0.9},
    "top-p 0.8, temperature 0.9": {"top_p": 0.8, "temperature": 0.9},
}


def config(**fields: Any) -> GPT2Config:
    """Return the config of a small GPT-2, with more fields."""
    sizes = {"vocab_size": VOCAB, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
    return GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, pad_token_id=0, **fields)


def make_model(folder: Path) -> Any:
    """Write a GPT-2 with random weights into a folder, and return it."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config(initializer_range=0.3)).eval()
    model.save_pretrained(folder)
    return model


def texts() -> list[str]:
    """Return some modules of the standard library."""
    return [path.read_text(encoding="utf-8") for path in sorted(Path(os.__file__).parent.glob("[a-c]*.py"))]


def make_tokenizer(folder: Path) -> None:
    """Train a BPE on the standard library's text, and write vocab.json and merges.txt into a folder."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts(), VOCAB, special_tokens=[END], show_progress=False)
    bpe.save_model(str(folder))


def ours(folder: Path, options: dict[str, Any], tp: int) -> Sequence[Any]:
    """Return what Megaloom writes for the prompts."""
    settings = {"max_new_tokens": NEW_TOKENS, **options}
    add_bos = settings.pop("add_bos", False)
    return generate(folder, PROMPTS, GenerationSettings(**settings), add_bos=add_bos, tp=tp)


def prompt_ids(tokenizer: Any, prompt: str, options: dict[str, Any]) -> list[int]:
    """Return the ids of a prompt, by transformers."""
    begin = [tokenizer.bos_token_id] if options.get("add_bos") else []
    return [*begin, *tokenizer(prompt)["input_ids"]]


def theirs(model: Any, tokenizer: Any, options: dict[str, Any]) -> list[tuple[list[int], float | None]]:
    """Return the tokens, up to the one that ends them, and the score that transformers finds for each prompt."""
    ends = [tokenizer.convert_tokens_to_ids(name) for name in options.get("eos_token_id", (END,))]
    search = {name: value for name, value in options.items() if name in ("num_beams", "length_penalty")}
    out = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt_ids(tokenizer, prompt, options)])
        shown = {"return_dict_in_generate": True, "output_scores": True}
        length = {"max_new_tokens": NEW_TOKENS, "eos_token_id": ends, "attention_mask": torch.ones_like(ids)}
        made = model.generate(ids, **length, **search, **shown)
        tokens = made.sequences[0, ids.shape[1] :].tolist()
        stop = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
        out.append((tokens[:stop], float(made.sequences_scores[0]) if search else None))
    return out


def compare_search(name: str, found: Sequence[Any], expected: list[tuple[list[int], float | None]]) -> bool:
    """Print and return whether the tokens and scores of all prompts are those of transformers."""
    pairs = [(list(x.tokens), tokens) for x, (tokens, _) in zip(found, expected, strict=True)]
    equal = sum(a == b for pair in pairs for a, b in zip(*pair, strict=False))
    count, expected_count = (sum(map(len, side)) for side in zip(*pairs, strict=True))
    line = f"{name:30}{count} tokens, {expected_count} by transformers, {equal} equal"
    scores = [(x.score, score) for x, (_, score) in zip(found, expected, strict=True) if score is not None]
    if scores:
        line += "; scores " + ", ".join(f"{a:.5f} and {b:.5f}" for a, b in scores)
    print(line)
    return all(a == b for a, b in pairs) and all(abs(a - b) < 1e-4 for a, b in scores)


def compare_draws(name: str, found: Sequence[Any], model: Any, tokenizer: Any, options: dict[str, Any]) -> bool:
    """Print the mean log probability of the drawn tokens and its expectation; return whether they are close.

    The mean is -inf if a token is not among those that transformers' top-k and top-p leave after the tokens before it.
    """
    drawn, means, variances = [], [], []
    for x in found:
        ids = prompt_ids(tokenizer, x.prompt, options)
        row = torch.tensor([[*ids, *x.tokens]])
        with torch.no_grad():
            logits = model(row, attention_mask=torch.ones_like(row)).logits[0, len(ids) - 1 : -1]
        log_p = warped(logits, options).log_softmax(-1)
        p, finite = log_p.exp(), log_p.clamp(min=-1e9)
        means.append((p * finite).sum(-1))
        variances.append((p * finite**2).sum(-1) - means[-1] ** 2)
        drawn.append(log_p.gather(1, torch.tensor(x.tokens)[:, None])[:, 0])
    all_drawn, expected = torch.cat(drawn), torch.cat(means).mean()
    mean, error = all_drawn.mean(), torch.cat(variances).sum().sqrt() / len(all_drawn)
    print(
        f"{name:30}{len(all_drawn)} tokens drawn, {int(all_drawn.isinf().sum())} that transformers leaves out; mean "
        f"log probability {mean:.4f}, by transformers {expected:.4f} ± {error:.4f}"
    )
    return bool(abs(mean - expected) < 3 * error)


def warped(logits: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Return logits [positions, vocab] after temperature, top-k and top-p, by transformers."""
    classes = {
        "temperature": logits_process.TemperatureLogitsWarper,
        "top_k": logits_process.TopKLogitsWarper,
        "top_p": logits_process.TopPLogitsWarper,
    }
    for name, warper in classes.items():
        if name in options:
            logits = warper(options[name])(None, logits)
    return logits


def compare_all(
    folder: Path, model: Any, tokenizer: Any, names: Sequence[str], tp: int, samples: int = SAMPLES
) -> bool:
    """Generate in these ways by a run or a Hugging Face folder, and by transformers. Return whether all agree."""
    agree = []
    for name in names:
        if name in SEARCHED:
            options = SEARCHED[name]
            agree.append(compare_search(name, ours(folder, options, tp), theirs(model, tokenizer, options)))
        else:
            drawn = {**DRAWN[name], "do_sample": True, "num_return_sequences": samples}
            agree.append(compare_draws(name, ours(folder, drawn, tp), model, tokenizer, DRAWN[name]))
    return all(agree)


def main(tp: int = 2) -> bool:
    """Generate in each way with both, print their numbers, and return whether all agree."""
    logging.set_verbosity_error()
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "gpt2"
        model = make_model(folder)
        make_tokenizer(folder)
        return compare_all(folder, model, GPT2Tokenizer.from_pretrained(folder), (*SEARCHED, *DRAWN), tp)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
