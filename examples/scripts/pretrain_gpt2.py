"""Accelerate's Megatron-LM plugin: GPT-2 on an indexed dataset with a train step of one's own, scored and converted.

The options are those of its guide: TP 2, PP 2, sequence parallelism, selective recomputation, the distributed
optimizer, clipping at 1.0, a linear schedule, vocab.json and merges.txt, splits, the key-token loss with alpha 0.25,
shards of at most 200 MB, generation. Validation and test losses of the run must be those of the guide's formula on the
logits of transformers and the tokens that megatron-core reads. Both must generate the same tokens.

    python -m megaloom.examples.scripts.pretrain_gpt2               # 8 processes; exit code 1 if a number differs
    python -m megaloom.examples.scripts.pretrain_gpt2 4 10 60       # 4 processes, 10 steps, 60 documents
"""

import json
import sys
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2LMHeadModel, GPT2Tokenizer, logging

from megaloom.examples.scripts import generation, key_tokens
from megaloom.examples.scripts.bert_tagger import run
from megaloom.runtime.training.evaluation import evaluate_run

KEYWORDS = ("def", "self", "None", "return", " def", " self", " None", " return", " if", " import")
ALPHA, SEQ = 0.25, 64
SAMPLES = 64  # of each prompt: the mean log probability of draws is known to 0.015
SPLIT = (90, 5, 5)  # percent of the documents: training, validation, test
WAYS = ("greedy", "20 beams, length penalty 1.5", "top-k 50, temperature 0.9", "top-p 0.8, temperature 0.9")
LAYOUT = "--tp 2 --pp 2 --sequence-parallel --recompute selective --recompute-modules core_attn"
RECIPE = "--lr 3e-3 --schedule linear --warmup 2 --clip-grad 1.0"


def write_sources(documents: int) -> list[int]:
    """Write text.jsonl, vocab.json, merges.txt and config.json into this folder. Return the ids of the key tokens."""
    texts = [text for module in generation.texts() for text in module.split("\n\n\n") if text.strip()]
    Path("text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:documents]))
    generation.make_tokenizer(Path())
    generation.config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).save_pretrained(".")
    ids = GPT2Tokenizer.from_pretrained(".")(list(KEYWORDS))["input_ids"]
    return [each[0] for each in ids if len(each) == 1]


def windows(part: int) -> Tensor:
    """Return the windows [windows, seq + 1] of a part of the dataset, as megatron-core reads it."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset  # after megaloom.runtime has prepared it

    data = IndexedDataset("text")
    first, last = (round(len(data) * sum(SPLIT[:k]) / 100) for k in (part, part + 1))
    tokens = torch.cat([torch.tensor(data[i].astype("int64")) for i in range(first, last)])
    return tokens.unfold(0, SEQ + 1, SEQ)


def by_guide(model: Any, text: Tensor, keys: Sequence[int]) -> tuple[float, float]:
    """Return the loss of the guide's GPTTrainStepWithCustomLoss, and its loss of tokens."""
    inputs, labels = text[:, :-1], text[:, 1:]
    with torch.no_grad():
        logits = model(inputs).logits.transpose(1, 2)
    loss_per_sample = torch.nn.functional.cross_entropy(logits, labels, reduction="none").mean(axis=1)
    weights = torch.stack([(inputs == kt).float() for kt in keys]).sum(axis=[0, 2])
    weights = 1.0 + ALPHA * weights
    return (loss_per_sample * weights).mean().item(), loss_per_sample.mean().item()


def compare(part: str, model: Any, text: Tensor, keys: Sequence[int]) -> bool:
    """Print and return whether the losses of the run on a part of the data are those of the guide."""
    result = evaluate_run(Path("run"), part=part).losses[0].result
    found, expected = (result.loss, result.report["lm loss"]), by_guide(model, text, keys)
    print(
        f"{part:12}{len(text)} windows; key-token loss {found[0]:.6f}, by transformers {expected[0]:.6f}; "
        f"lm loss {found[1]:.6f}, by transformers {expected[1]:.6f}"
    )
    return all(abs(a - b) < 1e-4 for a, b in zip(found, expected, strict=True))


def main(devices: int = 8, steps: int = 60, documents: int = 220, *, ways: Sequence[str] = WAYS) -> bool:
    """Go from text to generated text in an empty folder, and return whether all numbers agree."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with TemporaryDirectory() as folder, chdir(folder):
        keys = write_sources(documents)
        run("data text.jsonl -o text --tokenizer vocab.json --tokenizer-type GPT2BPETokenizer --append-eos")
        data = f"--data text --split {','.join(map(str, SPLIT))} --seq {SEQ} --batch 16"
        layout = f"--devices {devices} {LAYOUT}" + f" --dp {devices // 4} --distributed-optimizer" * (devices > 4)
        schedule = f"{RECIPE} --steps {steps} --evaluate-every {steps // 2}"
        step = f"{key_tokens.__file__}:KeyTokenSteps(key_tokens={tuple(keys)}, alpha={ALPHA})"
        run(f"train config.json {data} {layout} {schedule} --steps-from '{step}' --out run")
        run("convert run --to hf --max-shard-size 200MB -o hf")
        model, tokenizer = GPT2LMHeadModel.from_pretrained("hf").eval(), GPT2Tokenizer.from_pretrained("hf")
        agree = [compare(part, model, windows(k), keys) for k, part in ((1, "validation"), (2, "test"))]
        agree.append(generation.compare_all(Path("run"), model, tokenizer, ways, tp=2, samples=SAMPLES))
    return all(agree)


if __name__ == "__main__":
    sys.exit(0 if main(*map(int, sys.argv[1:])) else 1)
