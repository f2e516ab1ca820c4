"""Models that need labels or images: text has none, and --data synthetic makes them up and says so everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megaloom.dsl import Classification, Dim, Embed, MaskedToken, Model, Select, Unembed, apply, ids, model, weight
from megaloom.dsl.catalog import find
from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import graph
from megaloom.runtime.cli.main import main
from megaloom.runtime.cli.run_page import run_page
from megaloom.runtime.samples.samples import SampleMaker
from megaloom.runtime.training.run_data import check_labels
from tests.support.paths import TEST_MODELS

SMALL = TEST_MODELS / "small.py"
ADVICE = "make a dataset with them: megaloom data"


def classifier() -> Model:
    d = Dim("embed", 16)
    x = apply(Select("seq", 0), ids() >> Embed(weight("wte", Dim("vocab", 300), d)))
    return model("classifier", x >> Unembed(weight("classes", Dim("vocab", 5), d)) >> Classification())


def tagger() -> Model:
    d = Dim("embed", 16)
    x = ids() >> Embed(weight("wte", Dim("vocab", 300), d))
    return model("tagger", x >> Unembed(weight("tags", Dim("vocab", 9), d)) >> MaskedToken())


@pytest.mark.parametrize(
    ("declared", "needs"),
    [
        (classifier(), "classifier needs the class of each sample, and --data books has none"),
        (tagger(), "tagger needs the class of each token, and --data books has none"),
        (find(f"{SMALL}:tiny_vit")[0], "tiny-vit needs images and the class of each sample, and --data books has none"),
        (find(f"{SMALL}:tiny_llava")[0], "tiny-llava needs images, and --data books has none"),
    ],
    ids=lambda value: value.name if isinstance(value, Model) else "",
)
def test_labels_and_images_that_text_does_not_have_are_refused(declared: Model, needs: str) -> None:
    g = graph(declared)
    with pytest.raises(UserError, match=f"{needs}\n{ADVICE}"):
        check_labels(g, ["books"])
    maker = SampleMaker.of(g, 32)
    with pytest.raises(UserError, match=ADVICE):
        maker.make(next_text(maker.length), 0, 1)
    check_labels(g, ["synthetic"])
    check_labels(g, ["books"], OwnData())
    made = SampleMaker.of(g, 32, synthetic=True).make(next_text(maker.length), 0, 1)
    assert made.keys() == {n.name for n in g.nodes if n.is_input}


class OwnData:
    """Steps that make their own samples."""

    def data_step(self, maker: SampleMaker, text: object, i: int, seed: int) -> dict[str, object]:
        return {}


def next_text(length: int) -> torch.Tensor:
    return torch.arange(length) % 200


@pytest.mark.parametrize("name", ["tiny_gpt", "tiny_bert", "tiny_pair"])
def test_models_of_text_need_no_labels(name: str) -> None:
    check_labels(graph(find(f"{SMALL}:{name}")[0]), ["books"])


def test_a_run_on_made_up_data_says_so_everywhere(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, options = tmp_path / "run", ["--seq", "16", "--batch", "4", "--devices", "1", "--evaluate-batches", "1"]
    train = ["train", f"{SMALL}:tiny_vit", *options, "--steps", "2", "--out", str(run)]
    assert main(train) == 2
    assert "tiny-vit needs images and the class of each sample, and --data stdlib has none\n" in capfd.readouterr().err
    assert not run.exists()
    assert main([*train, "--data", "synthetic"]) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert said.count("tokens, labels and images are made up") == 2  # at the start, and in the report
    assert "step 2 held-out loss" in said
    assert "nats (synthetic classification), accuracy 0." in said and "(4 synthetic samples)" in said
    assert "over 4 held-out synthetic samples" in said
    assert "--data synthetic" in said[said.index("to train further") :]
    assert "labels and images are made up" in run_page(run)
    assert main(["evaluate", str(run), "--data", "stdlib"]) == 2
    assert "--data stdlib has none" in capfd.readouterr().err
    assert main(["evaluate", str(run), "--data", "synthetic", "--batches", "1"]) == 0
    assert "nats (synthetic classification)" in " ".join(capfd.readouterr().out.split())
