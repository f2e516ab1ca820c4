"""NeMo's Megatron BERT, from text and a bare vocabulary to a tagger that is fine-tuned, packed and scored.

A WordPiece vocabulary is trained on Python's standard library, as BioMegatron has one of PubMed. A BERT, configured by
NeMo's JSON, learns to predict masked pieces of it under tensor parallelism, stops, and resumes. Then it learns the
class that `tokenize` gives each word of Python. Its accuracy and macro F1 on held-out lines must be those that
scikit-learn computes from the predictions of transformers' MegatronBertForTokenClassification, which reads the tagger
and the lines by itself.

    python -m megaloom.examples.scripts.bert_tagger          # exit code 1 if a score differs
    python -m megaloom.examples.scripts.bert_tagger 4 400    # 4 steps of each kind, and 400 lines

This needs one more package: pip install scikit-learn
"""

import json
import shlex
import sys
from contextlib import chdir
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from sklearn.metrics import accuracy_score, f1_score
from tokenizers import BertWordPieceTokenizer
from transformers import AutoTokenizer, MegatronBertForTokenClassification, logging

from megaloom.examples.scripts.labelled_data import tokens
from megaloom.runtime.cli.main import main as megaloom

BERT = {"hidden-size": 64, "num-attention-heads": 4, "num-layers": 2, "max-seq-length": 64}  # NeMo's names
VOCAB = 1000
LONGEST = 60  # characters of a line: as many pieces at most, and [CLS] and [SEP], fit into a sequence
RUN = "--tp 2 --devices 2 --seq 64 --batch 16 --warmup 0 --schedule constant"
ORACLES = {
    "loss": "transformers",
    "accuracy": "scikit-learn from the predictions of transformers",
    "macro_f1": "scikit-learn from the predictions of transformers",
}
SPLIT = "80,10,10"  # of the documents: training, validation, test


def run(line: str) -> None:
    """Print and run a command of megaloom. End this program if the command fails."""
    print(f"$ megaloom {line}", flush=True)
    words = shlex.split(line)
    sys.argv = ["megaloom", *words]  # as which the command speaks of itself
    if code := megaloom(words):
        sys.exit(code)


def write_sources(lines: int) -> list[dict[str, Any]]:
    """Write text.jsonl, code.jsonl, vocab.txt and bert.json into this folder. Return the lines of code."""
    short = (row for row in tokens() if sum(map(len, row["words"])) <= LONGEST)
    rows = list(islice(short, lines))
    texts = [" ".join(word for row in rows[i : i + 10] for word in row["words"]) for i in range(0, lines, 10)]
    Path("text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    Path("code.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = BertWordPieceTokenizer(lowercase=False)
    tokenizer.train_from_iterator(texts, VOCAB, min_frequency=1, show_progress=False)
    tokenizer.save_model(".")
    Path("bert.json").write_text(json.dumps(BERT))
    return rows


def pretrain(steps: int) -> None:
    """Train the BERT on masked pieces: half of the steps, and the rest by the same command."""
    vocab = len(Path("vocab.txt").read_text().splitlines())
    run("data text.jsonl -o text --tokenizer vocab.txt --tokenizer-type BertWordPieceCase")
    for last in (steps // 2, steps):
        run(
            f"train bert.json --set vocab_size={vocab} --data text --split {SPLIT} {RUN} --lr 2e-3 --steps {last} "
            f"--save-every {steps // 2} --keep-best 2 --out bert"
        )
    run("convert bert --to hf -o bert-hf")


def tune(steps: int, classes: int) -> None:
    """Train a tagger on labelled words, from the weights of the BERT and a new head, and pack it into one file."""
    head = MegatronBertForTokenClassification.from_pretrained("bert-hf", num_labels=classes)
    head.save_pretrained("headed")
    AutoTokenizer.from_pretrained("bert-hf").save_pretrained("headed")
    run("data code.jsonl -o code --tokenizer bert-hf --key words --label-key classes")
    run(f"train --from headed --data code --split {SPLIT} {RUN} --lr 2e-3 --steps {steps} --evaluate-all --out tagger")
    run("pack tagger -o tagger.megaloom")
    run("evaluate tagger.megaloom --data code --part test")
    run("convert tagger --to hf -o tagger-hf")


def ours() -> dict[str, float]:
    """Return the scores of the test part in the metrics of the run."""
    events = [json.loads(line) for line in Path("tagger/metrics.jsonl").read_text().splitlines()]
    found: dict[str, float] = next(event["scores"] for event in events if event["event"] == "test")
    return found


def theirs(rows: list[dict[str, Any]], names: list[str]) -> dict[str, float]:
    """Return the scores of transformers on lines: of the first piece of each word."""
    model = MegatronBertForTokenClassification.from_pretrained("tagger-hf").eval()
    tokenizer = AutoTokenizer.from_pretrained("tagger-hf")
    given, predicted = [], []
    for row in rows:
        pieces = tokenizer(row["words"], is_split_into_words=True, return_tensors="pt")
        words = pieces.word_ids()
        with torch.no_grad():
            found = model(**pieces).logits[0].argmax(-1).tolist()
        given += [names.index(name) for name in row["classes"]]
        predicted += [found[words.index(i)] for i in range(len(row["words"]))]
    return scores(given, predicted)


def scores(given: list[int], predicted: list[int]) -> dict[str, float]:
    """Return accuracy and macro F1 by scikit-learn."""
    f1 = f1_score(given, predicted, average="macro")
    return {"accuracy": float(accuracy_score(given, predicted)), "macro_f1": float(f1)}


def agree(found: dict[str, float], expected: dict[str, float]) -> bool:
    """Print numbers beside those of their oracles, and return whether they are equal: a loss but for rounding."""
    for name, number in expected.items():
        print(f"{name:10}{found[name]:.6f}, by {ORACLES[name]} {number:.6f}")
    allowed = {name: 1e-5 if name == "loss" else 1e-9 for name in expected}
    return found.keys() == expected.keys() and all(abs(found[k] - expected[k]) < allowed[k] for k in expected)


def main(steps: int = 60, lines: int = 2000) -> bool:
    """Go all the way in an empty folder, print both scores, and return whether they are equal."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with TemporaryDirectory() as folder, chdir(folder):
        rows = write_sources(lines)
        names = sorted({name for row in rows for name in row["classes"]})
        pretrain(steps)
        tune(steps, len(names))
        found, expected = ours(), theirs(rows[lines * 9 // 10 :], names)
    return agree(found, expected)


if __name__ == "__main__":
    sys.exit(0 if main(*map(int, sys.argv[1:])) else 1)
