"""Real data with labels and pairs, from the packages that have them to trained models whose scores an oracle confirms.

A ViT reads scikit-learn's digits. A BERT tells the language of Django's messages, another one the class of each word of
Python's standard library. A T5 translates Django's messages. Each is trained, evaluated on data that are held out, and
converted. transformers reads the weights, and the data from their packages, and predicts. Loss, and accuracy and macro
F1 as scikit-learn computes them from these predictions, must be those of `megaloom evaluate`.

    python -m megaloom.examples.scripts.labelled_runs              # a minute for each; exit code 1 if a number differs
    python -m megaloom.examples.scripts.labelled_runs digits 20    # digits, languages, tokens or translations; 20 steps

This needs two more packages: pip install scikit-learn django
"""

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import chdir
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from attrs import asdict, frozen
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    BertForSequenceClassification,
    BertForTokenClassification,
    T5ForConditionalGeneration,
    ViTForImageClassification,
    logging,
)

from megaloom.examples.scripts import labelled_data
from megaloom.examples.scripts.bert_tagger import agree, run, scores
from megaloom.runtime.training.evaluation import evaluate_run

SEQ = 64
TRAINED = 80  # percent of the rows; the others are held out
END = 0  # the byte after each text of a pair; the decoder reads it first
IGNORED = -100
AT_ONCE = 256  # texts that transformers predicts at once
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = {**SIZES, **NO_DROPOUT, "vocab_size": labelled_data.BYTES, "max_position_embeddings": 128}
VIT = {**SIZES, "image_size": 8, "patch_size": 2, "num_labels": 10}
T5 = {
    "vocab_size": labelled_data.BYTES,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": END,
}

Rows = list[dict[str, Any]]
Predicted = tuple[Tensor, Tensor]  # logits [predictions, classes] and classes [predictions] of what is held out
Names = list[str]  # of the classes, in order


@frozen
class Case:
    """A model of labelled_data.py, the options of its data and its training, and transformers' model."""

    model: str
    data: str
    train: str
    steps: int
    theirs: Any
    config: Mapping[str, Any]
    predict: Callable[[Any, Rows, Names], Predicted]


def padded(rows: list[list[int]], value: int = 0) -> Tensor:
    """Return rows [rows, longest], with a value after their ends."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


def logits(it: Any, texts: list[list[int]], labels: Tensor | None = None) -> Tensor:
    """Return the logits of transformers for texts of bytes: [texts, …, classes]."""
    inputs = {"input_ids": padded(texts), "attention_mask": padded([[1] * len(text) for text in texts])}
    if labels is not None:
        inputs["labels"] = labels
    parts = zip(*(x.split(AT_ONCE) for x in inputs.values()), strict=True)
    return torch.cat([it(**dict(zip(inputs, part, strict=True))).logits for part in parts])


def digits(it: Any, rows: Rows, names: Names) -> Predicted:
    """Predict the digits of images, whose pixels are from -1 to 1."""
    held_out = labelled_data.digits_in_parts()[1]
    pixels = torch.stack([torch.tensor(image) for image, _ in held_out]) / 127.5 - 1
    found = it(pixel_values=pixels[:, None].expand(-1, 3, -1, -1)).logits
    return found, torch.tensor([label for _, label in held_out])


def languages(it: Any, rows: Rows, names: Names) -> Predicted:
    """Predict the language of texts."""
    found = logits(it, [list(row["text"].encode())[:SEQ] for row in rows])
    return found, torch.tensor([names.index(row["language"]) for row in rows])


def tokens(it: Any, rows: Rows, names: Names) -> Predicted:
    """Predict the class of words at their first byte. A line has as many pieces as it needs."""
    pieces, classes = [], []
    for row in rows:
        words = [list(f"{word} ".encode()) for word in row["words"]]
        text = [byte for word in words for byte in word]
        firsts = ([names.index(name)] for name in row["classes"])
        of_bytes = [label for word in words for label in next(firsts) + [IGNORED] * (len(word) - 1)]
        pieces += [text[i : i + SEQ] for i in range(0, len(text), SEQ)]
        classes += [of_bytes[i : i + SEQ] for i in range(0, len(text), SEQ)]
    labels = padded(classes, IGNORED)
    return logits(it, pieces)[labels != IGNORED], labels[labels != IGNORED]


def translations(it: Any, rows: Rows, names: Names) -> Predicted:
    """Predict each byte of the translations from those before it."""
    sources, targets = ([[*row[key].encode()[: SEQ - 1], END] for row in rows] for key in ("en", "de"))
    labels = padded(targets, IGNORED)
    return logits(it, sources, labels)[labels != IGNORED], labels[labels != IGNORED]


SPLIT = f"--split {TRAINED},{100 - TRAINED} --seq {SEQ}"
CASES = {
    "digits": Case("digit", "--image-size 8", "--dp 2 --split 100", 400, ViTForImageClassification, VIT, digits),
    "languages": Case(
        "language",
        "--tokenizer bytes --label-key language",
        f"--tp 2 {SPLIT}",
        400,
        BertForSequenceClassification,
        {**BERT, "num_labels": len(labelled_data.LANGUAGES)},
        languages,
    ),
    "tokens": Case(
        "tagger",
        "--tokenizer bytes --key words --label-key classes",
        f"--pp 2 --vpp 1 {SPLIT}",
        300,
        BertForTokenClassification,
        {**BERT, "num_labels": 6},
        tokens,
    ),
    "translations": Case(
        "translator",
        "--tokenizer bytes --source-key en --target-key de",
        f"--dp 2 {SPLIT}",
        400,
        T5ForConditionalGeneration,
        T5,
        translations,
    ),
}


def write_data(name: str, case: Case, most: int | None) -> tuple[Rows, Names]:
    """Write the dataset `data`; of digits also `held-out`. Return the rows that are held out, and the classes.

    most: rows of text that are read; None for all.
    """
    if name == "digits":
        labelled_data.write_digits(Path("images"))
        run(f"data images/training -o data {case.data}")
        run(f"data images/test -o held-out {case.data}")
        return [], []
    rows = list(islice(labelled_data.ROWS[name](), most))
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run(f"data rows.jsonl -o data {case.data}")
    labels = {label for row in rows for label in row.get("classes", ()) or (row.get("language"),) if label}
    return rows[round(len(rows) * TRAINED / 100) :], sorted(labels)


def ours() -> dict[str, float]:
    """Return the loss, and the scores if there are any, of the run on what is held out."""
    sources = ["held-out"] if Path("held-out.bin").exists() else []
    result = evaluate_run(Path("run"), sources).losses[0].result
    return {"loss": result.loss, **(asdict(result.scores) if result.scores else {})}


def theirs(case: Case, rows: Rows, names: Names) -> dict[str, float]:
    """Return the loss of transformers on what is held out and, of a classifier, the scores of its predictions."""
    it = case.theirs.from_pretrained("hf").eval()
    with torch.no_grad():
        found, given = case.predict(it, rows, names)
    scored = scores(given.tolist(), found.argmax(-1).tolist()) if case.theirs is not T5ForConditionalGeneration else {}
    return {"loss": cross_entropy(found, given).item(), **scored}


def confirmed(name: str, steps: int | None = None, most: int | None = None) -> bool:
    """Go all the way in an empty folder, print the numbers, and return whether they are equal.

    steps: of training; None for as many as give a good model. most: rows of text that are read; None for all.
    """
    case = CASES[name]
    with TemporaryDirectory() as folder, chdir(folder):
        rows, names = write_data(name, case, most)
        model = f"{Path(labelled_data.__file__)}:{case.model}"
        options = f"{case.train} --devices 2 --precision fp32 --steps {steps or case.steps}"
        run(f"train {model} --data data {options} --out run")
        config = case.theirs.config_class(**case.config, architectures=[case.theirs.__name__])
        config.save_pretrained("config")
        run("convert run --to hf --config config -o hf")
        found, expected = ours(), theirs(case, rows, names)
    return agree(found, expected)


def main(name: str | None = None, steps: int | None = None) -> bool:
    """Train on the data of this name, or on all, and return whether all numbers are those of the oracles."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    agreed = [confirmed(each, steps) for each in ([name] if name else CASES)]
    return all(agreed)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] not in CASES:
        sys.exit(f"usage: {sys.argv[0]} [{{{','.join(CASES)}}} [STEPS]]")
    sys.exit(0 if main(next(iter(sys.argv[1:]), None), *map(int, sys.argv[2:])) else 1)
