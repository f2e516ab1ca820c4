"""Findings about data, tokenizers, generation and evaluation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.findings.finding import Verdict, finding, megaloom, passes, refuses


def small_model(folder: Path, **options: object) -> Path:
    """Write a GPT-2 of two layers into a folder as transformers does, without a tokenizer."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32, "vocab_size": 300} | options
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return folder


def with_vocabulary(folder: Path, *, whole: bool) -> Path:
    """Write a BPE of 270 tokens into a folder, as tokenizer.json or as vocab.json and merges.txt."""
    from megaloom.runtime.data.tokenizer import train_bpe

    folder.mkdir(exist_ok=True)
    train_bpe(["the purpose of life is to be"] * 5, 270, folder)
    if not whole:
        model = json.loads((folder / "tokenizer.json").read_text())["model"]
        (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
        (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).unlink()
    return folder


@finding("spotcheck N2", "generate reads a folder with vocab.json and merges.txt as bytes", Verdict.MENDED)
def vocabulary_files(folder: Path) -> str:
    found = []
    for whole in (True, False):
        model = with_vocabulary(small_model(folder / str(whole)), whole=whole)
        words = ("--prompt", "the purpose of life is", "--max-new-tokens", "4", "--json")
        ended = megaloom(folder, "generate", str(model), *words)
        found.append(json.loads(passes(ended, '"tokens"'))["tokens"])
    assert found[0] == found[1], found
    return f"both write {found[0]}"


@finding("features D7", "Errors of tokenizers are cut and do not name the format", Verdict.REFUSED)
def tokenizer_errors(folder: Path) -> str:
    (folder / "text.txt").write_text("the purpose of life")
    words = folder / "words"
    words.mkdir()
    (words / "vocab.txt").write_text("[UNK]\n[PAD]\n[CLS]\n[SEP]\n[MASK]\nthe\n")
    bare = with_vocabulary(folder / "bpe", whole=False)

    def said(tokenizer: Path, *message: str) -> str:
        return refuses(megaloom(folder, "data", "text.txt", "-o", "out", "--tokenizer", str(tokenizer)), *message)

    said(words / "vocab.txt", "is a WordPiece vocabulary (vocab.txt)", "--tokenizer-type BertWordPieceLowerCase or")
    said(bare, "is a byte-level BPE (vocab.json, merges.txt)", "tokenizer_config.json")
    return said(words, "is a WordPiece vocabulary (vocab.txt)", "tokenizer_config.json")


@finding("spotcheck N6", "Padded rows of prompts are read as text", Verdict.MENDED)
def padded_prompts(folder: Path) -> str:
    from transformers import GPT2LMHeadModel

    from megaloom.dsl.errors import UserError
    from megaloom.runtime import GenerationSettings, generate

    model = small_model(folder / "model", pad_token_id=1)
    rows, mask = [[1, 1, 5, 9], [7, 8, 20, 3]], [[0, 0, 1, 1], [1, 1, 1, 1]]
    settings = GenerationSettings(max_new_tokens=5)
    ours = [list(x.tokens) for x in generate(model, rows, settings, attention_mask=mask)]
    import torch

    theirs = GPT2LMHeadModel.from_pretrained(model)
    expected = theirs.generate(torch.tensor(rows), attention_mask=torch.tensor(mask), max_new_tokens=5)[:, 4:].tolist()
    assert ours == expected, (ours, expected)
    with pytest.raises(UserError, match="is padding, and would be read as text"):
        generate(model, rows, settings)
    return f"with a mask {ours} as transformers; refused without one"


@finding("fuzz D5", "A lone surrogate in JSONL ends in a traceback and leaves files", Verdict.REFUSED)
def lone_surrogate(folder: Path) -> str:
    (folder / "d.jsonl").write_text('{"text": "a"}\n{"text": "\\ud800"}\n')
    with_vocabulary(folder / "bpe", whole=True)
    seen = ""
    for words in (("--tokenizer", "bpe"), ("--tokenizer", "bytes"), ("--train-vocab", "300")):
        ended = megaloom(folder, "data", "d.jsonl", "-o", "out", *words)
        seen = refuses(ended, "d.jsonl, line 2, has a surrogate without its pair")
        assert not list(folder.glob("out*"))
    return seen


@finding("fuzz D17", "A dataset and its tokenizer may not belong together", Verdict.REFUSED)
def foreign_tokenizer(folder: Path) -> str:
    (folder / "text.jsonl").write_text('{"text": "the purpose of life is to be"}\n' * 300)
    passes(megaloom(folder, "data", "text.jsonl", "-o", "ds", "--train-vocab", "270"))
    words = ("train", "--data", "ds", "--set", "vocab=300", "--steps", "1", "--devices", "1", "--batch", "2")

    def refused(name: str, change: Callable[[str], str], message: str) -> str:
        path = folder / name
        before = path.read_bytes()
        path.write_bytes(change(before.decode("latin-1")).encode("latin-1"))
        seen = refuses(megaloom(folder, *words), message)
        path.write_bytes(before)
        return seen

    refused("ds-tokenizer/tokenizer.json", lambda text: text[: len(text) // 2], "is not the tokenizer that made")
    refused("ds.json", lambda text: re.sub(r'"vocab": \d+', '"vocab": 1', text), "has changed since it was written")
    refused("ds.json", lambda text: text.replace('"documents": 300', '"documents": -200'), "has changed since")
    refused("ds.bin", lambda text: text[:-2] + chr(ord(text[-2]) ^ 1) + text[-1], "ds.bin has changed since")
    twins = json.loads((folder / "ds-tokenizer" / "tokenizer.json").read_text())
    twins["model"]["vocab"]["twin"] = 5
    (folder / "twins.json").write_text(json.dumps(twins))
    again = megaloom(folder, "data", "text.jsonl", "-o", "other", "--tokenizer", "twins.json")
    return refuses(again, "has two tokens of the id 5")


def trained(folder: Path, *words: str) -> Path:
    """Train the default model for a step on one process, and return the folder of the run."""
    small = ("--set", "layers=1", "--set", "ff=64", "--seq", "16", "--batch", "2")
    passes(megaloom(folder, "train", *small, "--steps", "1", "--devices", "1", "--out", "run", *words))
    return folder / "run"


@finding("spotcheck N7", "Boundaries of sentence-split data are not those of GPTDataset", Verdict.MENDED)
def boundaries(folder: Path) -> str:
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(folder / "ds.bin"), dtype=np.uint8)
    for i in range(100):
        lengths = [20 + i] * (1 + i % 5)
        builder.add_document(torch.randint(1, 255, (sum(lengths),)), lengths)
    builder.finalize(str(folder / "ds.idx"))
    run = trained(folder, "--data", "ds", "--split", "8,1,1")
    lengths = [20 + i for i in range(100) for _ in range(1 + i % 5)]
    part = lengths[round(0.8 * 300) : round(0.9 * 300)]
    tokens = (sum(part) - 1) // 16 * 16
    return passes(megaloom(folder, "evaluate", str(run), "--part", "validation"), "--split 8,1,1", f" {tokens:,}")


@finding("newcomer B10", "evaluate wants --data, although the run knows it", Verdict.MENDED)
def own_data(folder: Path) -> str:
    (folder / "text.txt").write_text("the quick brown fox " * 500)
    run = trained(folder, "--data", "text.txt")
    return passes(megaloom(folder, "evaluate", str(run)), "validation part", "text.txt")


@finding("newcomer 72", "evaluate of a run that does not exist says that --data is missing", Verdict.REFUSED)
def no_run(folder: Path) -> str:
    return refuses(megaloom(folder, "evaluate", "runs/none"), "runs/none is not a run folder")


@finding("users 15", "Weights with NaN are taken by --from without a word", Verdict.MENDED)
def weights_with_nan(folder: Path) -> str:
    import torch
    from safetensors.torch import load_file, save_file

    model = small_model(folder / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["transformer.wte.weight"][299, 0] = torch.nan
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    (folder / "text.txt").write_text("the quick brown fox " * 500)
    options = (
        "--data",
        "text.txt",
        "--seq",
        "16",
        "--batch",
        "2",
        "--steps",
        "1",
        "--devices",
        "1",
    )
    ended = megaloom(folder, "train", "--from", "model", *options)
    lines = [line for line in ended.text.splitlines() if "NaN or infinite values in" in line]
    assert len(lines) == 1, ended.end
    assert "transformer.wte.weight" in lines[0], lines
    return lines[0]


@finding("newcomer A4", "README's data example is refused, and only after a plan was searched", Verdict.MENDED)
def data_example(folder: Path) -> str:
    lines = [json.dumps({"text": f"{i} foxes and {i * i} dogs"}) for i in range(20_000)]
    (folder / "books.jsonl").write_text("\n".join(lines) + "\n")
    made = megaloom(folder, "data", "books.jsonl", "-o", "books", "--train-vocab", "8192")
    passes(made, "megaloom train --set vocab=")
    wrong = megaloom(folder, "train", "--data", "books")
    refuses(wrong, "give --set vocab=")
    assert "plan" not in wrong.text.lower(), wrong.end
    quick = ("--steps", "1", "--devices", "1", "--batch", "2", "--seq", "32")
    ended = megaloom(folder, "train", "--set", "vocab=8192", "--data", "books", *quick)
    assert not (folder / "runs" / "stdlib-gpt-vocab-8192" / "hugging-face").exists()
    return passes(ended, "to train further")


@finding("features D11", "Small ones of data: ids, windows, splits and a hugging-face folder", Verdict.MENDED)
def small_ones(folder: Path) -> str:
    (folder / "docs.jsonl").write_text('{"text": "the purpose of life is to be"}\n' * 400)
    (folder / "text.txt").write_text("the purpose of life " * 300)
    passes(megaloom(folder, "data", "docs.jsonl", "-o", "ds", "--train-vocab", "270"))
    run = trained(folder, "--data", "ds", "--set", "vocab=1000")
    assert not (run / "hugging-face").exists()
    words = ("--prompt", "the", "--do-sample", "--temperature", "9", "--max-new-tokens", "60", "--json")
    tokens = json.loads(passes(megaloom(folder, "generate", str(run), *words), '"tokens"').partition("\n")[0])["tokens"]
    vocab = json.loads((folder / "ds.json").read_text())["ids"]["vocab"]
    assert max(tokens) < vocab, tokens
    count = json.loads((folder / "ds.json").read_text())["tokens"]
    ended = megaloom(folder, "evaluate", str(run), "--data", "ds", "--split", "50,30,20")
    return passes(ended, f" {(count - 1) // 16 * 16:,}", "all parts")


@finding("spotcheck N12", "No option evaluates or saves once an epoch", Verdict.MENDED)
def each_epoch(folder: Path) -> str:
    sizes = ("--set", "layers=1", "--set", "embed=32", "--set", "heads=2", "--set", "kv_heads=1")
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    options = ("--data", "text.txt", "--devices", "1", "--seq", "64", "--batch", "2", "--epochs", "2")
    each = ("--evaluate-every-epoch", "--save-every-epoch", "--keep-last", "5", "--out", "run")
    passes(megaloom(folder, "train", "stdlib-gpt", *sizes, *options, *each))
    saved = sorted(path.name for path in (folder / "run").glob("step-*-epoch-*"))
    assert len(saved) == 2, saved
    return ", ".join(saved)
