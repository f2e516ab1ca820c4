"""Labels, pairs and images beside indexed datasets: what is stored, in which order, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from attrs import evolve
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from megaloom.dsl.errors import UserError
from megaloom.runtime.data import documents
from megaloom.runtime.data.corpus import open_corpus
from megaloom.runtime.data.data_split import RowUnit, labelled_pieces
from megaloom.runtime.data.description import Description
from megaloom.runtime.data.images import ImageSize
from megaloom.runtime.data.indexed import open_indexed
from megaloom.runtime.data.labels import IGNORED, Labels, LabelUnit
from megaloom.runtime.data.preprocess import preprocess
from megaloom.runtime.data.preprocess_options import Preprocessing
from megaloom.runtime.data.rows import Keys
from megaloom.runtime.data.token_ids import Template
from megaloom.runtime.data.tokenizer import load_tokenizer

LANGUAGES = ["fr", "de", "en"]
TAGGED = Keys("words", "tags")


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def made(prefix: Path, source: Path, keys: Keys, **options: Any) -> Description:
    tokenizer = None if "image" in options or "train_vocab" in options else "bytes"
    request = Preprocessing(**{"tokenizer": tokenizer, **options}, sources=(str(source),), prefix=prefix, keys=keys)
    return preprocess(request, lambda text, done, total: None)[0]


def labels_of(prefix: Path) -> list[list[int]]:
    data = open_indexed(Path(f"{prefix}-labels"))
    return [data.document(i).tolist() for i in range(data.documents)]


def test_one_class_for_each_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk numbers names for itself; the dataset has the numbers of the sorted list. Empty texts are left out."""
    monkeypatch.setattr(documents, "CHUNK_NBYTES", 100)
    rows = [{"text": f"text {i}" * (i != 4), "lang": LANGUAGES[i % 3]} for i in range(20)]
    about = made(tmp_path / "a", write(tmp_path / "a.jsonl", rows), Keys(label="lang"))
    assert about.labels == Labels(LabelUnit.DOCUMENT, 3, ("de", "en", "fr"))
    assert about.documents == 19
    wanted = [["de", "en", "fr"].index(row["lang"]) for row in rows if row["text"]]
    assert labels_of(tmp_path / "a") == [[x] for x in wanted]
    assert made(tmp_path / "a", tmp_path / "a.jsonl", Keys(label="lang")).tokens_digest == about.tokens_digest
    with pytest.raises(UserError, match="exists, made of other sources or with other options"):
        made(tmp_path / "a", tmp_path / "a.jsonl", Keys())
    corpus = open_corpus([str(tmp_path / "a")], "80,20", tmp_path)
    assert corpus.kind.labels == about.labels and corpus.kind.words == "text with a label for each document"


def test_changed_labels_are_refused(tmp_path: Path) -> None:
    made(
        tmp_path / "a", write(tmp_path / "a.jsonl", [{"text": "one", "n": 0}, {"text": "two", "n": 3}]), Keys(label="n")
    )
    assert labels_of(tmp_path / "a") == [[0], [3]]
    stored = tmp_path / "a-labels.bin"
    stored.write_bytes(np.array([0, 2], "<i2").tobytes())
    with pytest.raises(UserError, match=r"a.bin has changed since a.json was written"):
        open_corpus([str(tmp_path / "a")], None, tmp_path)


def test_a_label_for_each_word_is_that_of_its_first_token(tmp_path: Path) -> None:
    rows = [{"words": ["ab", "c"], "tags": ["N", None]}, {"words": ["d", "ef"], "tags": ["V", "N"]}]
    about = made(tmp_path / "a", write(tmp_path / "a.jsonl", rows), TAGGED, append_eos=True)
    assert about.labels == Labels(LabelUnit.TOKEN, 2, ("N", "V"))
    assert open_indexed(tmp_path / "a").document(0).tobytes() == b"ab c \0"
    x = IGNORED
    assert labels_of(tmp_path / "a") == [[0, x, x, x, x, x], [1, x, 0, x, x, x]]


def test_a_label_for_each_token_of_a_text(tmp_path: Path) -> None:
    rows = [{"words": "abc", "tags": [1, IGNORED, 0]}]
    about = made(tmp_path / "a", write(tmp_path / "a.jsonl", rows), TAGGED)
    assert (about.labels, labels_of(tmp_path / "a")) == (Labels(LabelUnit.TOKEN, 2), [[1, IGNORED, 0]])


def test_pieces_have_all_labelled_tokens_once(tmp_path: Path) -> None:
    """Pieces of five tokens of documents of 1 to 12; of which those without a labelled token are left out."""
    random = np.random.default_rng(0)
    rows = [
        {"words": "x" * n, "tags": [int(t) if t >= 0 else None for t in random.integers(-4, 2, n)]}
        for n in range(1, 13)
    ]
    made(tmp_path / "a", write(tmp_path / "a.jsonl", rows), TAGGED)
    part = open_corpus([str(tmp_path / "a")], "100", tmp_path).train
    (span,) = part.ranges
    pieces = labelled_pieces(span.dataset, span.start, span.stop, 5)
    found = [(a, b) for a, b in pieces.tolist()]
    assert all(0 < b - a <= 5 for a, b in found)
    assert span.dataset.labels is not None
    tags, starts = span.dataset.labels.array, {span.dataset.document_at(a) for a, _ in found}
    assert all(
        (tags[a:b] != IGNORED).any() and span.dataset.document_at(a) == span.dataset.document_at(b - 1)
        for a, b in found
    )
    inside = np.zeros(len(tags), int)
    for a, b in found:
        inside[a:b] += 1
    assert inside.max() == 1 and (tags[inside == 0] == IGNORED).all() and len(starts) > 5
    rows_of = evolve(part, rows=RowUnit.PIECE)
    seen = {tuple(rows_of.sample(i, seq=5, seed=1).labels.tolist()) for i in range(rows_of.windows(5))}
    assert seen == {tuple(tags[a:b].tolist()) for a, b in found}


def test_pairs_are_two_datasets_of_as_many_documents(tmp_path: Path) -> None:
    rows = [{"en": "yes", "de": "ja"}, {"en": "no", "de": ""}, {"en": "always", "de": "immer"}]
    about = made(tmp_path / "a", write(tmp_path / "a.jsonl", rows), Keys("en", target="de"))
    assert about.pairs and about.documents == 2
    both = [open_indexed(tmp_path / name) for name in ("a", "a-target")]
    assert [[d.document(i).tobytes() for i in range(2)] for d in both] == [[b"yes", b"always"], [b"ja", b"immer"]]


def test_classes_of_a_dataset_keep_their_names_and_order(tmp_path: Path) -> None:
    features = datasets.Features({"text": datasets.Value("string"), "kind": datasets.ClassLabel(names=["z", "a", "m"])})
    datasets.Dataset.from_dict({"text": ["x", "y"], "kind": [0, 1]}, features).save_to_disk(str(tmp_path / "saved"))
    about = made(tmp_path / "a", tmp_path / "saved", Keys(label="kind"))
    assert (about.labels, labels_of(tmp_path / "a")) == (Labels(LabelUnit.DOCUMENT, 3, ("z", "a", "m")), [[0], [1]])


def draw(path: Path, color: tuple[int, int, int]) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 4), color).save(path)


def test_images_of_a_folder_for_each_class(tmp_path: Path) -> None:
    """They are resized and mixed: the first half of the data has both classes."""
    pytest.importorskip("PIL")
    for i in range(20):
        draw(tmp_path / "images" / "ab"[i % 2] / f"{i}.png", (100 + i, 0, 50 * (i % 2)))
    about = made(tmp_path / "p", tmp_path / "images", Keys("image", "label"), image=ImageSize(2, 3))
    assert (about.image, about.labels, about.documents) == (
        ImageSize(2, 3),
        Labels(LabelUnit.DOCUMENT, 2, ("a", "b")),
        20,
    )
    data, labels = open_indexed(tmp_path / "p"), [x for (x,) in labels_of(tmp_path / "p")]
    pixels = [data.document(i).reshape(3, 2, 3) for i in range(20)]
    assert all((x[2] == 50 * label).all() and (x[1] == 0).all() for x, label in zip(pixels, labels, strict=True))
    assert sorted(int(x[0, 0, 0]) for x in pixels) == [*range(100, 120)]
    assert {*labels[:10]} == {0, 1}


def test_images_of_a_column(tmp_path: Path) -> None:
    from PIL import Image

    images = [Image.new("L", (4, 4), 10 * i) for i in range(3)]
    data = datasets.Dataset.from_dict({"image": images, "label": [2, 0, 1]})
    data.cast_column("image", datasets.Image()).save_to_disk(str(tmp_path / "saved"))
    about = made(tmp_path / "p", tmp_path / "saved", Keys("image", "label"), image=ImageSize(4, 4))
    assert about.labels == Labels(LabelUnit.DOCUMENT, 3)
    assert [int(open_indexed(tmp_path / "p").document(i)[0]) for i in range(3)] == [0, 10, 20]


BAD: dict[str, tuple[list[dict[str, Any]], Keys, str]] = {
    "no label": (
        [{"text": "a", "n": None}],
        Keys(label="n"),
        "line 1, has the label None under 'n'\na label is a name",
    ),
    "fraction": ([{"text": "a", "n": 0.5}], Keys(label="n"), "has the label 0.5"),
    "negative": ([{"text": "a", "n": -1}], Keys(label="n"), "has the label -1"),
    "two types": (
        [{"text": "a", "n": 1}, {"text": "b", "n": "x"}],
        Keys(label="n"),
        "has the label 'x', and other labels",
    ),
    "no key": ([{"text": "a"}], Keys(label="n"), "line 1, has no 'n': give --label-key one of text"),
    "lengths": ([{"words": ["a"], "tags": []}], TAGGED, "has 0 labels under 'tags' for 1 words under 'words'"),
    "tokens": ([{"words": "abc", "tags": [1]}], TAGGED, "has 1 labels under 'tags' for 3 tokens"),
    "kinds": (
        [{"words": "a", "tags": 1}, {"words": "a", "tags": [1]}],
        TAGGED,
        "one label for each token under 'tags'",
    ),
    "only ignored": ([{"words": "a", "tags": [None]}], TAGGED, "no token of the data has a label"),
    "one key": ([{"text": "a"}], Keys("text", target="text"), "must be different keys"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_labels_are_refused(name: str, tmp_path: Path) -> None:
    rows, keys, message = BAD[name]
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        made(tmp_path / "a", write(tmp_path / "a.jsonl", rows), keys)
    assert not (tmp_path / "a.idx").exists()


def test_sentences_are_the_sequences_of_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each chunk, and of the joined dataset; megatron-core reads them as we do."""
    pytest.importorskip("sentencex")
    monkeypatch.setattr(documents, "CHUNK_NBYTES", 60)
    texts = ["Dr. Smith went home. He slept.", "One.", "", "Two? Three! Four."]
    source = write(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    about = made(tmp_path / "a", source, Keys(), sentences="en", append_eos=True)
    data = open_indexed(tmp_path / "a")
    assert (about.documents, data.documents, data.sequences) == (3, 3, 6)
    assert data.document(0).tobytes() == b"Dr. Smith went home. He slept.\0"
    assert data.sequence_lengths.tolist() == [21, 10, 5, 5, 7, 6]
    assert data.inner_starts(1, 48).tolist() == [20, 40]  # "He", "Three!", and not the beginnings of documents
    assert data.inner_starts(0, 21).tolist() == [] and data.inner_starts(0, 22).tolist() == [21]
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    theirs = IndexedDataset(str(tmp_path / "a"))
    assert theirs.document_indices.tolist() == [0, 2, 3, 6]
    assert bytes(theirs[1].tolist()) == b"He slept.\0"
    with pytest.raises(UserError, match="--split-sentences English is not a language\ngive its ISO code, such as en"):
        made(tmp_path / "b", source, Keys(), sentences="English")
    with pytest.raises(UserError, match="--split-sentences is for text without labels"):
        made(tmp_path / "b", source, Keys(label="text"), sentences="en")


def test_text_files_have_no_keys(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match=r"a.txt is a text file, which has no keys for --label-key"):
        made(tmp_path / "a", tmp_path / "a.txt", Keys(label="n"))


@pytest.mark.parametrize(
    ("processor", "template"),
    [
        (None, Template()),
        (
            processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1)),
            Template((1,), (2,), ((1,), (2,), (2,)), (0, 0, 0, 1, 1)),
        ),
        (
            processors.RobertaProcessing(("[SEP]", 2), ("[CLS]", 1)),
            Template((1,), (2,), ((1,), (2, 2), (2,)), (0, 0, 0, 0, 0, 0)),
        ),
    ],
)
def test_special_tokens_are_those_of_the_template(processor: Any, template: Template, tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "[CLS]": 1, "[SEP]": 2, "b": 3}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if processor is not None:
        backend.post_processor = processor
    backend.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert loaded.ids.template == template
    tokens, words = loaded.encode_words(["b", "a b"])
    assert (tokens.tolist(), words.tolist()) == ([3, 0, 3], [0, 1, 1])
