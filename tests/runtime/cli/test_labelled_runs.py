"""Runs on labelled data, pairs and images by the command line: trained, scored, evaluated, or refused with numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaloom.dsl import MLP, Model, graph, packed
from megaloom.dsl.errors import UserError
from megaloom.examples.bert import bert
from megaloom.examples.scripts import labelled_data
from megaloom.examples.t5 import t5
from megaloom.runtime.cli.main import main
from megaloom.runtime.data.description import DataKind
from megaloom.runtime.data.images import ImageSize
from megaloom.runtime.data.labels import Labels, LabelUnit
from megaloom.runtime.samples.class_names import check_class_names
from megaloom.runtime.samples.data_checks import check_kind
from megaloom.runtime.samples.objectives import objective_of
from megaloom.runtime.training.run_data import check_labels
from tests.support.models.small import tiny_bert, tiny_gpt, tiny_vit
from tests.support.paths import ROOT

SCRIPT = ROOT / "examples/scripts/labelled_data.py"
TRAIN = ["--seq", "24", "--batch", "8", "--devices", "1", "--steps", "2", "--split", "70,30", "--evaluate-all"]


def written(path: Path, name: str, count: int) -> Path:
    """Write the first rows of the data of a name."""
    rows = islice(labelled_data.ROWS[name](), count)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_tagger_trains_and_evaluate_prints_its_scores(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Held-out accuracy and F1 are in the output of both commands and in metrics.jsonl, and are equal."""
    source, prefix, run = written(tmp_path / "code.jsonl", "tokens", 60), tmp_path / "code", tmp_path / "run"
    words = ["data", str(source), "-o", str(prefix), "--tokenizer", "bytes", "--key", "words", "--label-key", "classes"]
    assert main(words) == 0
    assert "classes of tokens: COMMENT, KEYWORD, NAME, " in capfd.readouterr().out
    assert main(["train", f"{SCRIPT}:tagger", "--data", str(prefix), "--out", str(run), *TRAIN]) == 0
    said = " ".join(capfd.readouterr().out.split())
    scores = next(e["scores"] for e in events(run) if e["event"] == "evaluation")
    assert 0 < scores["macro_f1"] < scores["accuracy"] < 1
    assert f"held-out accuracy {scores['accuracy']:.4f}, macro F1 {scores['macro_f1']:.4f}" in said
    assert "nats (classification)" in said and "synthetic" not in said
    assert main(["evaluate", str(run)]) == 0
    out = " ".join(capfd.readouterr().out.split())
    assert "loss unit accuracy macro F1 tokens" in out
    assert f"{scores['accuracy']:.4f} {scores['macro_f1']:.4f}" in out


def test_images_train_a_vit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    for i, pixels in enumerate(np.random.default_rng(0).integers(256, size=(40, 8, 8)).astype("uint8")):
        (folder := tmp_path / "images" / str(i % 10)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    assert main(["data", str(tmp_path / "images"), "-o", str(tmp_path / "p"), "--image-size", "8"]) == 0
    assert "40 images of 8 x 8 pixels, 10 classes: 0, 1," in capfd.readouterr().out
    run = ["train", f"{SCRIPT}:digit", "--data", str(tmp_path / "p"), "--out", str(tmp_path / "run"), *TRAIN]
    assert main(run) == 0
    assert "macro F1" in (said := capfd.readouterr().out) and "(all 12 samples)" in said
    assert main(["data", str(tmp_path / "images"), "-o", str(tmp_path / "q"), "--image-size", "8", "--key", "x"]) == 0


DOCUMENTS, TOKENS = (DataKind(Labels(unit, 5, tuple("abcde"))) for unit in (LabelUnit.DOCUMENT, LabelUnit.TOKEN))
PAIRS = DataKind(pairs=True)
IMAGES = DataKind(Labels(LabelUnit.DOCUMENT, 10), image=ImageSize(12, 12))


def classifier(classes: int) -> Model:
    return bert("classifier", 1, 2, 16, 16, vocab=256, classes=classes)


def tagger() -> Model:
    return bert("tagger", 1, 2, 16, 16, vocab=256, tags=5)


def pair() -> Model:
    return t5("pair", 1, 2, 16, MLP(16, "relu"), vocab=256)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (
            lambda: classifier(5),
            DataKind(),
            "classifier needs the class of each sample, and X has none\nmake a dataset",
        ),
        (lambda: classifier(5), TOKENS, "needs the class of each sample, and X is text with a label for each token"),
        (tagger, DOCUMENTS, "needs the class of each token, and X is text with a label for each document"),
        (lambda: classifier(4), DOCUMENTS, r"X has labels of 5 classes \(a, b, c, d, e\), and classifier has 4\n"),
        (tiny_gpt, PAIRS, "X is pairs of texts, and tiny-gpt predicts the token after each position"),
        (tiny_gpt, IMAGES, "X is images with a label for each image, and tiny-gpt does not classify images"),
        (tiny_vit, DOCUMENTS, "tiny-vit needs images, and X is text with a label for each document"),
        (labelled_data.digit, IMAGES, "has images of 3 channels, 12 x 12 pixels, and digit reads 3 channels, 8 x 8"),
        (pair, PAIRS, "end with padding, which the attention of pair would read: .*\ngive --set padded=true"),
        (tiny_bert, PAIRS, "which the attention of tiny-bert would read"),
    ],
)
def test_data_of_another_kind_are_refused(make: Callable[[], Model], kind: DataKind, message: str) -> None:
    g = graph(make())
    with pytest.raises(UserError, match=message):
        check_kind(g, objective_of(g), kind, "X")


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: classifier(6), DOCUMENTS),
        (lambda: classifier(5), DataKind(DOCUMENTS.labels, pairs=True)),
        (tagger, TOKENS),
        (tiny_vit, IMAGES),
        (lambda: packed(pair()), PAIRS),
        (lambda: packed(tiny_bert()), PAIRS),
        (tiny_gpt, DOCUMENTS),
    ],
)
def test_data_that_fit_are_taken(make: Callable[[], Model], kind: DataKind) -> None:
    g = graph(make())
    check_kind(g, objective_of(g), kind, "X")


@pytest.mark.parametrize("named", [("c", "b", "a"), ("a", "b", "d")])
def test_classes_of_a_config_in_another_order_are_refused(named: tuple[str, ...], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    kind = DataKind(Labels(LabelUnit.DOCUMENT, 3, ("a", "b", "c")))
    config.write_text(json.dumps({"model_type": "bert", "id2label": {str(i): x for i, x in enumerate(named)}}))
    with pytest.raises(UserError, match=f"X has the classes a, b, c in this order, .* has {', '.join(named)}\nlabel"):
        check_class_names(str(config), kind, "X")


@pytest.mark.parametrize(("named", "names"), [("abcd", "abc"), (("LABEL_0", "LABEL_1"), "ab"), ("cba", ""), ("", "ab")])
def test_classes_in_the_order_of_a_config_are_taken(named: Any, names: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "bert", "id2label": {str(i): x for i, x in enumerate(named)}}))
    check_class_names(str(config), DataKind(Labels(LabelUnit.DOCUMENT, 3, tuple(names))), "X")


def test_pairs_train_a_t5(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, prefix = written(tmp_path / "de.jsonl", "translations", 30), tmp_path / "de"
    keys = ["--source-key", "en", "--target-key", "de"]
    assert main(["data", str(source), "-o", str(prefix), "--tokenizer", "bytes", *keys]) == 0
    assert "30 pairs" in capfd.readouterr().out
    run = ["train", f"{SCRIPT}:translator", "--data", str(prefix), "--out", str(tmp_path / "run"), *TRAIN]
    assert main(run) == 0
    assert "perplexity" in capfd.readouterr().out
    assert main(["generate", str(tmp_path / "run"), "--prompt", "Yes", "--max-new-tokens", "3"]) == 0
    with pytest.raises(UserError, match="tiny-gpt predicts the token after each position"):
        check_labels(graph(tiny_gpt()), [str(prefix)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--source-key", "a"], "--source-key needs --target-key"),
        (["--target-key", "a"], "--target-key needs --source-key"),
        (["--key", "a", "--source-key", "b", "--target-key", "c"], "--key a and --source-key b exclude each other"),
        (["--image-size", "8", "--tokenizer", "bytes"], "--image-size is for images, which have no --tokenizer"),
        (["--image-size", "8x"], "--image-size 8x is not a size"),
    ],
)
def test_options_that_contradict_each_other(
    words: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": "b"}\n')
    assert main(["data", str(tmp_path / "a.jsonl"), "-o", str(tmp_path / "out"), *words]) == 2
    assert message in capfd.readouterr().err
