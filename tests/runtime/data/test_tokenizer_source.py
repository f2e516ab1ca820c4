"""Tokenizers that a user names: bare vocabularies as transformers' classes read them, names of the hub, wrong files."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import sentencepiece

from megaloom.dsl.errors import UserError
from megaloom.runtime.data.indexed import open_indexed
from megaloom.runtime.data.preprocess import preprocess
from megaloom.runtime.data.preprocess_options import Preprocessing
from megaloom.runtime.data.rows import Keys
from megaloom.runtime.data.tokenizer import load_tokenizer, save_tokenizer, train_bpe
from megaloom.runtime.data.tokenizer_files import TOKENIZER_FILE_NAMES
from megaloom.runtime.data.tokenizer_source import HUB_NAMES, opened_tokenizer
from megaloom.runtime.weights.hugging_face_files import COPIED_FILES
from tests.support.models.hugging_face import transformers

TEXTS = ["The life of Émile is  to be", "a 42 b\n\tc 'tis", "the lifes", "日本 x", ""]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "life", "em", "##ile", "is", "##s", "a", "##f", "o"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of bare vocabularies with the names that Megatron-LM's users know, and of wrong files."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "bert-large-uncased-vocab.txt").write_text("\n".join(WORDS) + "\n")
    (folder / "cased-vocab.txt").write_text("\n".join([*WORDS, "The", "É", "##mile"]) + "\n")
    train_bpe(TEXTS * 5, 290, folder / "json")
    model = json.loads((folder / "json" / "tokenizer.json").read_text())["model"]
    (folder / "gpt2-vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "gpt2-merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    shutil.copyfile(folder / "gpt2-vocab.json", folder / "alone-vocab.json")
    shutil.copyfile(folder / "gpt2-vocab.json", folder / "unnamed.json")
    kept = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}  # as Llama's
    (folder / "tokenizer.model").write_bytes(_sentencepiece("bpe", 300, byte_fallback=True, **kept))
    (folder / "spiece.model").write_bytes(_sentencepiece("unigram", 29, pad_id=0, eos_id=1, unk_id=2, bos_id=-1))
    (folder / "tiktoken.model").write_text("IQ== 0\nIg== 1\n")
    (folder / "pointer.model").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    (folder / "other.model").write_bytes(b"\x00\x01")
    (folder / "empty-vocab.txt").write_text("")
    (folder / "book.txt").write_text("It was the best of times,\nit was\n")
    (folder / "no-unknown.txt").write_text("the\na\n")
    (folder / "list.json").write_text('[{"rank": 0, "token_bytes": "IQ=="}]')
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    (folder / "fields.json").write_text('{"a": [1]}')
    return folder


def _sentencepiece(kind: str, vocab: int, **options: object) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 3),
        model_writer=model,
        model_type=kind,
        vocab_size=vocab,
        minloglevel=3,
        **options,
    )
    return model.getvalue()


def bert(files: Path, name: str, *, lower: bool) -> Any:
    return transformers.BertTokenizer(vocab=str(files / name), do_lower_case=lower)


def gpt2(files: Path) -> Any:
    return transformers.GPT2Tokenizer(vocab=str(files / "gpt2-vocab.json"), merges=str(files / "gpt2-merges.txt"))


def by_class(name: str, files: Path, model: str, new: Path) -> Any:
    """transformers' class for a folder with a SentencePiece model."""
    new.mkdir()
    shutil.copyfile(files / model, new / model)
    return getattr(transformers, name).from_pretrained(new)


READ: dict[str, tuple[str, str, Callable[[Path, Path], Any]]] = {
    "uncased": (
        "bert-large-uncased-vocab.txt",
        "BertWordPieceLowerCase",
        lambda files, new: bert(files, "bert-large-uncased-vocab.txt", lower=True),
    ),
    "cased": ("cased-vocab.txt", "BertWordPieceCase", lambda files, new: bert(files, "cased-vocab.txt", lower=False)),
    "gpt2": ("gpt2-vocab.json", "GPT2BPETokenizer", lambda files, new: gpt2(files)),
    "gpt2 by its merges": ("gpt2-merges.txt", "GPT2Tokenizer", lambda files, new: gpt2(files)),
    "llama": (
        "tokenizer.model",
        "LlamaTokenizer",
        lambda files, new: by_class("LlamaTokenizer", files, "tokenizer.model", new),
    ),
    "t5": ("spiece.model", "T5Tokenizer", lambda files, new: by_class("T5Tokenizer", files, "spiece.model", new)),
}


@pytest.mark.parametrize("case", READ)
def test_a_bare_vocabulary_gives_the_ids_of_the_class_in_transformers(case: str, files: Path, tmp_path: Path) -> None:
    """So does the copy that lies beside data and runs, and it has the special tokens of the class."""
    source, kind, made = READ[case]
    theirs = made(files, tmp_path / "theirs")
    with opened_tokenizer(str(files / source), kind) as name:
        save_tokenizer(name, tmp_path / "saved")
        read = load_tokenizer(name)
    assert not Path(name).exists()
    expected = [theirs(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    saved = load_tokenizer(str(tmp_path / "saved"))
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert [list(x) for x in read.encode(TEXTS)] == [list(x) for x in saved.encode(TEXTS)] == expected
    assert [again(text, add_special_tokens=False)["input_ids"] for text in TEXTS] == expected
    eos = theirs.sep_token_id if theirs.eos_token_id is None else theirs.eos_token_id
    for ours in (read, saved):
        assert (ours.ids.bos, ours.ids.eos, ours.ids.pad, ours.ids.mask) == (
            theirs.bos_token_id,
            eos,
            theirs.pad_token_id,
            theirs.mask_token_id,
        )


def test_a_sentencepiece_model_is_read_as_it_is(files: Path) -> None:
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(files / "tokenizer.model"))
    for kind in (None, "SentencePieceTokenizer", "GPTSentencePieceTokenizer"):
        with opened_tokenizer(str(files / "tokenizer.model"), kind) as name:
            read = load_tokenizer(name)
        assert [list(x) for x in read.encode(TEXTS)] == theirs.encode(TEXTS)
        assert (read.ids.bos, read.ids.eos) == (theirs.bos_id(), theirs.eos_id()) == (1, 2)


def test_the_settings_beside_a_vocabulary_say_how_it_is_used(files: Path, tmp_path: Path) -> None:
    shutil.copyfile(files / "cased-vocab.txt", tmp_path / "vocab.txt")
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text('{"tokenizer_class": "BertTokenizerFast", "do_lower_case": false}')
    expected = bert(files, "cased-vocab.txt", lower=False)(TEXTS[0], add_special_tokens=False)["input_ids"]
    for kind in (None, "BertWordPieceCase"):
        with opened_tokenizer(str(tmp_path / "vocab.txt"), kind) as name:
            assert list(load_tokenizer(name).encode(TEXTS[:1])[0]) == expected
    refused = r"BertWordPieceLowerCase contradicts \S*tokenizer_config.json, which has do_lower_case false\nomit it"
    with pytest.raises(UserError, match=refused), opened_tokenizer(str(tmp_path), "BertWordPieceLowerCase"):
        pass
    settings.write_text('{"tokenizer_class": "BertTokenizer"}')  # which is in lower case
    with pytest.raises(UserError, match=r"puts text in lower case, and its vocab.txt has the token 'The'\ngive --tok"):
        load_tokenizer(str(tmp_path))


REFUSED = {
    ("bert-large-uncased-vocab.txt", None): r"uncased-vocab.txt is a WordPiece vocabulary .*, and no file says whether "
    r"text is put in lower case\ngive --tokenizer-type BertWordPieceLowerCase or BertWordPieceCase",
    ("cased-vocab.txt", None): r"\(the token 'The' means that it is not\)\ngive --tokenizer-type BertWordPieceCase \(",
    ("cased-vocab.txt", "BertWordPieceLowerCase"): r"cased-vocab.txt puts text in lower case, and .* the token 'The'\n",
    ("cased-vocab.txt", "BertTokenizer"): r"BertTokenizer does not say whether text is put in lower case\ngive Bert",
    ("cased-vocab.txt", "ElectraTokenizer"): r"ElectraTokenizer does not say whether text is put in lower case\n",
    (
        "cased-vocab.txt",
        "GPT2BPETokenizer",
    ): r"GPT2BPETokenizer is for a byte-level BPE .*, and \S*cased-vocab.txt is a "
    r"WordPiece vocabulary \(vocab.txt\)\ngive BertWordPieceLowerCase or BertWordPieceCase",
    ("gpt2-vocab.json", None): r"no file says how text is split before it\ngive --tokenizer-type GPT2BPETokenizer",
    ("gpt2-vocab.json", "GPT2BPETokeniser"): r"'GPT2BPETokeniser' is unknown: did you mean GPT2BPETokenizer\?\ngive Be",
    ("gpt2-vocab.json", "GPT2Model"): r"'GPT2Model' is unknown",
    (
        "alone-vocab.json",
        "GPT2BPETokenizer",
    ): r"a part of a byte-level BPE .*, and \S*alone-merges.txt is missing\ncopy",
    (
        "unnamed.json",
        None,
    ): r"unnamed.json is not a tokenizer.json: it is a vocabulary\nname it vocab.json, put its mer",
    ("list.json", None): r"it is a list \(as the vocabularies of Megatron-LM's TikTokenizer\)\ngive a tokenizer.json",
    ("config.json", None): r"it is the config.json of a model\ngive its folder, or its tokenizer.json",
    ("fields.json", None): r"it has fields such as 'a', and no 'model'\n",
    ("json", "GPT2BPETokenizer"): r"has no effect: \S*json has a tokenizer.json, which says how text is split\nomit it",
    ("tokenizer.model", "Llama2Tokenizer"): r"omit it: .* --add-bos begins texts as Llama 2 does",
    (
        "tiktoken.model",
        None,
    ): r"tiktoken.model is a vocabulary of tiktoken \(as Llama 3's\), .*\ngive the tokenizer.json",
    ("pointer.model", None): r"pointer.model is a pointer of Git LFS, not the file itself\nrun `git lfs pull`",
    (
        "other.model",
        None,
    ): r"other.model is not a SentencePiece model: .*\ncopy the file again, or give a tokenizer.json",
    ("empty-vocab.txt", "BertWordPieceCase"): r"empty-vocab.txt is empty\ncopy the file again",
    (
        "book.txt",
        "BertWordPieceCase",
    ): r"line 1 of \S*book.txt has several words, 'It was the best of times,', so it is",
    ("no-unknown.txt", "BertWordPieceCase"): r"no-unknown.txt has 2 tokens, and \[UNK\] is not one of them\ngive the v",
    (
        "none.txt",
        None,
    ): r"no tokenizer \S*none.txt: there is no such file\ngive a file, a folder, a name on the Hugging",
}


@pytest.mark.parametrize(("source", "kind"), REFUSED)
def test_wrong_files_are_refused_by_their_names(source: str, kind: str | None, files: Path) -> None:
    with (
        pytest.raises(UserError, match=REFUSED[source, kind]) as refused,
        opened_tokenizer(str(files / source), kind) as name,
    ):
        load_tokenizer(name)
    assert "megaloom-" not in str(refused.value)  # the folder of copies


def test_a_name_of_the_hub_is_read_from_its_cache(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    cached = tmp_path / "models--bert-large-uncased"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    snapshot = cached / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    shutil.copyfile(files / "bert-large-uncased-vocab.txt", snapshot / "vocab.txt")
    (snapshot / "config.json").write_text('{"model_type": "bert"}')
    theirs = bert(files, "bert-large-uncased-vocab.txt", lower=True)
    for source in ("bert-large-uncased", "megatron-bert-uncased"):
        with opened_tokenizer(source) as name:
            tokens = load_tokenizer(name).encode(TEXTS)
        assert [list(x) for x in tokens] == [theirs(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    refused = (
        r"no tokenizer megatron-bert-cased \(bert-large-cased on the Hugging Face hub\): .*\ngive the folder of its"
    )
    with pytest.raises(UserError, match=refused), opened_tokenizer("megatron-bert-cased"):
        pass


def test_names_of_nemo_are_those_of_megatron_core() -> None:
    from megatron.core.tokenizers.text.libraries.megatron_hf_tokenizer import MEGATRON_CONFIG_MAP

    known = {name: fields["tokenizer_name"] for name, fields in MEGATRON_CONFIG_MAP.items() if name.startswith("mega")}
    assert known == HUB_NAMES


def test_a_run_keeps_all_files_of_a_tokenizer() -> None:
    assert set(TOKENIZER_FILE_NAMES) <= set(COPIED_FILES)


def test_documents_begin_with_the_beginning_of_text(files: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:2]))
    request = {"sources": (str(tmp_path / "a.jsonl"),), "add_bos": True}
    preprocess(
        Preprocessing(tokenizer=str(files / "tokenizer.model"), prefix=tmp_path / "a", append_eos=True, **request),
        lambda text, done, total: None,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(files / "tokenizer.model"))
    documents = [open_indexed(tmp_path / "a").document(i).tolist() for i in range(2)]
    assert documents == theirs.encode(TEXTS[:2], add_bos=True, add_eos=True)
    for options, says in (
        ({"tokenizer": "bytes"}, r"the tokenizer bytes names no token that begins a document, which --add-bos needs\n"),
        ({"tokenizer": "bytes", "keys": Keys("text", "label")}, r"--add-bos is for whole texts without labels, pairs"),
        ({"train_vocab": 300, "tokenizer_type": "X"}, r"--tokenizer-type X has no effect without --tokenizer\nadd"),
    ):
        with pytest.raises(UserError, match=says):
            preprocess(Preprocessing(prefix=tmp_path / "b", **request, **options), lambda text, done, total: None)
