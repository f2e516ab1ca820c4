"""Tokenizers of every format: read as transformers reads them, or refused with the format's name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from megaloom.dsl.errors import UserError
from megaloom.runtime.data.tokenizer import load_tokenizer, save_tokenizer, tokenizer_of, train_bpe

TEXT = "the purpose of life is to be"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "life", "is", "##s", "a"]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a vocab.json and a merges.txt, without settings."""
    trained, folder = tmp_path_factory.mktemp("trained"), tmp_path_factory.mktemp("bpe")
    train_bpe([TEXT] * 5, 270, trained)
    model = json.loads((trained / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    return folder


def copied(source: Path, folder: Path, **files: dict[str, object]) -> Path:
    """Return a new folder with the files of another and with JSON files."""
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    for name, fields in files.items():
        (folder / f"{name}.json").write_text(json.dumps(fields))
    return folder


@pytest.fixture
def words(tmp_path: Path) -> Path:
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return tmp_path / "words"


def check_as_transformers(folder: Path, saved: Path) -> None:
    """It has transformers' tokens, and so has its copy."""
    assert tokenizer_of((saved, folder)) == str(folder)
    ours, theirs = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    expected = theirs(TEXT, add_special_tokens=False)["input_ids"]
    save_tokenizer(str(folder), saved)
    assert [list(x.encode([TEXT])[0]) for x in (ours, load_tokenizer(str(saved)))] == [expected, expected]


def test_a_vocabulary_with_the_kind_of_its_model_is_read_as_by_transformers(bpe: Path, tmp_path: Path) -> None:
    check_as_transformers(copied(bpe, tmp_path / "gpt2", config={"model_type": "gpt2"}), tmp_path / "saved")
    named = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    check_as_transformers(copied(bpe, tmp_path / "named", tokenizer_config=named), tmp_path / "other")


def test_a_wordpiece_vocabulary_is_read_if_its_class_is_named(words: Path, tmp_path: Path) -> None:
    check_as_transformers(copied(words, tmp_path / "bert", config={"model_type": "bert"}), tmp_path / "saved")


REFUSED: dict[str, tuple[Callable[[Path, Path, Path], Path], str]] = {
    "no class": (
        lambda bpe, words, new: bpe,
        r"is a byte-level BPE \(vocab.json, merges.txt\), and no file says how text is split before it\n"
        r"give --tokenizer-type GPT2BPETokenizer \(`data` and `generate`\), or .*"
        r'with a tokenizer_config.json such as {"tokenizer_class": "GPT2Tokenizer"}',
    ),
    "no class of words": (
        lambda bpe, words, new: words,
        r"is a WordPiece vocabulary \(vocab.txt\), and no file says whether text is put in lower case\n"
        r"give --tokenizer-type BertWordPieceLowerCase or BertWordPieceCase .*do_lower",
    ),
    "one file": (
        lambda bpe, words, new: words / "vocab.txt",
        r"vocab.txt is one file of a WordPiece vocabulary \(vocab.txt\)\ngive its folder: --tokenizer .*words$",
    ),
    "a file is missing": (
        lambda bpe, words, new: _without(copied(bpe, new, config={"model_type": "gpt2"}), "merges.txt"),
        r"is a byte-level BPE \(vocab.json, merges.txt\), and merges.txt is missing\ncopy that file too",
    ),
    "class of another format": (
        lambda bpe, words, new: copied(bpe, new, config={"model_type": "bert"}),
        r"is a byte-level BPE .*, of which transformers' BertTokenizer \(for bert\) does not know the token ",
    ),
    "class of another format, which fails": (
        lambda bpe, words, new: copied(bpe, new, config={"model_type": "llama"}),
        r"cannot read the tokenizer .*, a byte-level BPE \(vocab.json, merges.txt\), as that of llama: .*sentencepiece",
    ),
    "settings alone": (
        lambda bpe, words, new: _without(
            copied(bpe, new, tokenizer_config={"tokenizer_class": "ByT5Tokenizer"}), "vocab.json", "merges.txt"
        ),
        r"cannot read the tokenizer .*, settings without a vocabulary \(tokenizer_config.json\), as that of ByT5",
    ),
    "the config of a model alone": (
        lambda bpe, words, new: _without(copied(bpe, new, config={"model_type": "gpt2"}), "vocab.json", "merges.txt"),
        r"no tokenizer in .*new\ngive --tokenizer a folder with tokenizer.json or tokenizer.model",
    ),
    "two tokens of one id": (
        lambda bpe, words, new: _doubled(new),
        r"the tokenizer new has two tokens of the id 5: '\S+' and 'twin'\ngive each token an id of its own",
    ),
    "empty": (lambda bpe, words, new: _cut(new), r"tokenizer.json is empty\ncopy the file again"),
}


def _without(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).unlink()
    return folder


def _doubled(folder: Path) -> Path:
    train_bpe([TEXT], 260, folder)
    fields = json.loads((folder / "tokenizer.json").read_text())
    fields["model"]["vocab"]["twin"] = 5
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    return folder


def _cut(folder: Path) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text("")
    return folder


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_by_the_name_of_its_format(
    case: str, bpe: Path, words: Path, tmp_path: Path
) -> None:
    make, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        load_tokenizer(str(make(bpe, words, tmp_path / "new")))


def test_a_folder_without_a_tokenizer_is_bytes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert tokenizer_of((tmp_path, tmp_path / "none")) == "bytes"
    train_bpe([TEXT], 260, tmp_path)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size() == 260
