"""`megaloom data`: every kind of source and tokenizer, any number of processes, stopped and continued, bad input."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow
import pytest
import sentencepiece
from attrs import evolve
from pyarrow import parquet
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from megaloom.dsl.errors import UserError
from megaloom.runtime.data import chunk_workers, documents, preprocess
from megaloom.runtime.data.description import Description
from megaloom.runtime.data.indexed import open_indexed
from megaloom.runtime.data.preprocess_options import Preprocessing
from megaloom.runtime.data.tokenizer import load_tokenizer, train_bpe
from tests.support.limits import LIMIT

TEXTS = [f"Document {i} says: the quick brown fox jumps over {i} lazy dogs.\n" * (1 + i % 3) for i in range(60)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a BPE of 300 tokens."""
    folder = tmp_path_factory.mktemp("tokenizer") / "bpe"
    train_bpe(TEXTS, 300, folder)
    return folder


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "CHUNK_NBYTES", 1000)


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def made(request: Preprocessing) -> Description:
    return preprocess.preprocess(request, lambda text, done, total: None)[0]


def texts_of(prefix: Path, tokenizer: str) -> list[str]:
    data, loaded = open_indexed(prefix), load_tokenizer(tokenizer)
    return [loaded.decode(data.document(i).tolist()) for i in range(data.documents)]


def _jsonl(folder: Path) -> Path:
    return write_jsonl(folder / "a.jsonl", [{"id": i, "text": t} for i, t in enumerate(TEXTS)])


def _parquet(folder: Path) -> Path:
    table = pyarrow.table({"text": TEXTS, "id": list(range(60))})
    parquet.write_table(table, folder / "a.parquet", row_group_size=17)
    return folder / "a.parquet"


def _saved(folder: Path) -> Path:
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def _files(folder: Path) -> Path:
    for i, text in enumerate(TEXTS):
        (folder / f"{i:02}.txt").write_text(text)
    return folder


@pytest.mark.parametrize("make", [_jsonl, _parquet, _saved, _files])
def test_every_kind_of_source_is_read(
    make: Callable[[Path], Path], tokenizer: Path, tmp_path: Path, small_chunks: None
) -> None:
    (tmp_path / "source").mkdir()
    source = make(tmp_path / "source")
    assert len(documents.open_source(str(source)).chunks) > 2
    request = Preprocessing(sources=(str(source),), prefix=tmp_path / "out", tokenizer=str(tokenizer))
    description = made(request)
    assert texts_of(tmp_path / "out", str(tmp_path / "out-tokenizer")) == TEXTS
    assert (description.documents, description.ids.vocab, description.ids.eos) == (60, 300, 0)
    assert sorted(p.name for p in tmp_path.glob("out*")) == ["out-tokenizer", "out.bin", "out.idx", "out.json"]


def test_a_folder_may_mix_text_jsonl_and_parquet(tmp_path: Path) -> None:
    for make in (_jsonl, _parquet, _files):
        make(tmp_path)
    made(Preprocessing(sources=(str(tmp_path),), prefix=tmp_path / "out", tokenizer="bytes"))
    assert sorted(texts_of(tmp_path / "out", "bytes")) == sorted(3 * TEXTS)


def test_bytes_that_are_no_utf8_are_kept_by_the_byte_tokenizer_alone(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    request = Preprocessing(
        sources=(str(tmp_path / "a.txt"),), prefix=tmp_path / "out", tokenizer="bytes", append_eos=True
    )
    made(request)
    assert open_indexed(tmp_path / "out").document(0).tobytes() == b"caf\xe9\0"
    with pytest.raises(UserError, match=r"a.txt is not UTF-8: byte 0xe9 at 3\nconvert the file, or"):
        made(evolve(request, prefix=tmp_path / "other", tokenizer=str(tokenizer)))
    assert not list(tmp_path.glob("other*"))


def test_tokens_are_those_of_transformers(tokenizer: Path, tmp_path: Path) -> None:
    made(
        Preprocessing(
            sources=(str(_jsonl(tmp_path)),), prefix=tmp_path / "out", tokenizer=str(tokenizer), append_eos=True
        )
    )
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out-tokenizer")
    data = open_indexed(tmp_path / "out")
    for i in range(0, 60, 7):
        assert data.document(i).tolist() == [*theirs(TEXTS[i])["input_ids"], theirs.eos_token_id]


def test_a_bare_tokenizer_file_and_a_sentencepiece_model_are_read(tokenizer: Path, tmp_path: Path) -> None:
    source = str(_jsonl(tmp_path))
    made(Preprocessing(sources=(source,), prefix=tmp_path / "a", tokenizer=str(tokenizer / "tokenizer.json")))
    assert Tokenizer.from_file(str(tmp_path / "a-tokenizer" / "tokenizer.json")).get_vocab_size() == 300
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=str(tmp_path / "sp"), vocab_size=45, minloglevel=2
    )
    description = made(
        Preprocessing(sources=(source,), prefix=tmp_path / "b", tokenizer=str(tmp_path / "sp.model"), append_eos=True)
    )
    assert (description.ids.vocab, description.ids.eos) == (45, 2)
    assert texts_of(tmp_path / "b", str(tmp_path / "b-tokenizer")) == [" ".join(t.split()) for t in TEXTS]


def test_a_vocabulary_is_trained_on_the_spot(tmp_path: Path) -> None:
    request = Preprocessing(sources=(str(_jsonl(tmp_path)),), prefix=tmp_path / "out", train_vocab=280, append_eos=True)
    description = made(request)
    assert description.ids.vocab == 280
    assert description.tokens < sum(map(len, TEXTS)) * 0.8
    assert texts_of(tmp_path / "out", str(tmp_path / "out-tokenizer")) == TEXTS
    with pytest.raises(UserError, match=r"--train-vocab 100 is too small: the bytes and .* are 257 tokens"):
        made(evolve(request, prefix=tmp_path / "small", train_vocab=100))
    assert not list(tmp_path.glob("small*"))


def test_processes_do_not_change_the_dataset(tokenizer: Path, tmp_path: Path, small_chunks: None) -> None:
    source = str(_jsonl(tmp_path))
    for workers in (1, 2):
        made(
            Preprocessing(sources=(source,), prefix=tmp_path / f"{workers}", tokenizer=str(tokenizer), workers=workers)
        )
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"1{suffix}").read_bytes() == (tmp_path / f"2{suffix}").read_bytes()


def test_a_killed_command_goes_on(tokenizer: Path, tmp_path: Path, small_chunks: None, monkeypatch) -> None:
    source = str(_jsonl(tmp_path))
    request = Preprocessing(sources=(source,), prefix=tmp_path / "out", tokenizer=str(tokenizer))
    made(evolve(request, prefix=tmp_path / "whole"))
    done: list[str] = []
    real = chunk_workers.tokenize_chunk

    def dies(task: chunk_workers.ChunkTask) -> int:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(task.out.name)
        return real(task)

    monkeypatch.setattr(chunk_workers, "tokenize_chunk", dies)
    with pytest.raises(KeyboardInterrupt):
        made(request)
    assert not (tmp_path / "out.idx").exists()
    left: list[str] = []
    monkeypatch.setattr(chunk_workers, "tokenize_chunk", lambda task: (left.append(task.out.name), real(task))[1])
    made(request)
    assert left[0] == "000003"
    assert not set(left) & set(done)
    assert (tmp_path / "out.bin").read_bytes() == (tmp_path / "whole.bin").read_bytes()
    left.clear()
    assert preprocess.preprocess(request, lambda text, done, total: None)[1]
    assert not left
    with pytest.raises(UserError, match=r"out.idx exists, made of other sources or with other options\nchoose"):
        made(evolve(request, append_eos=True))


def test_other_options_do_not_take_over_parts(tokenizer: Path, tmp_path: Path, monkeypatch) -> None:
    request = Preprocessing(sources=(str(_jsonl(tmp_path)),), prefix=tmp_path / "out", tokenizer=str(tokenizer))
    with monkeypatch.context() as patched:
        patched.setattr(preprocess, "_join", lambda *args: exec("raise KeyboardInterrupt"))
        with pytest.raises(KeyboardInterrupt):
            made(request)
    made(evolve(request, append_eos=True))
    assert open_indexed(tmp_path / "out").document(0)[-1] == 0


def test_a_killed_command_leaves_no_process(tmp_path: Path, monkeypatch) -> None:
    rows = [{"text": " ".join(f"word{i}{j}" for j in range(200))} for i in range(1500)]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    words = ["data", str(source), "-o", str(tmp_path / "out"), "--workers", "2"]
    command = f"""
import sys
from megaloom.runtime.data import documents
documents.CHUNK_NBYTES = 10_000
from megaloom.runtime.cli.main import main
if __name__ == "__main__":
    sys.exit(main([*{words}, "--tokenizer", "bytes"]))
"""
    (tmp_path / "run.py").write_text(command)
    process = subprocess.Popen([sys.executable, str(tmp_path / "run.py")], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + LIMIT
    while not list(tmp_path.glob("out.parts/*.idx")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=LIMIT)  # ends when no worker holds the pipe
    assert list(tmp_path.glob("out.parts/*.idx"))
    assert not (tmp_path / "out.idx").exists()
    monkeypatch.setattr(documents, "CHUNK_NBYTES", 10_000)
    made(Preprocessing(sources=(str(source),), prefix=tmp_path / "out", tokenizer="bytes"))
    assert open_indexed(tmp_path / "out").documents == 1500


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            lambda p: p.write_text('{"text": "a"}\n{"body": 1, "id": 2}\n'),
            r"line 2, has no 'text': give --key one of",
        ),
        (lambda p: p.write_text('{"txt": 1}\n'), r"line 1, has no 'text': did you mean txt\?\ngive --key one of txt"),
        (lambda p: p.write_text('{"text": "a"}\n\n{"text": \n'), r"line 3, is not JSON: "),
        (lambda p: p.write_text('["a"]\n'), r"line 1, is not a JSON object"),
        (
            lambda p: p.write_text('{"text": 3}\n'),
            r"line 1, has a value of type int under 'text'\na document is a text",
        ),
        (
            lambda p: p.write_text('{"text": "a"}\n{"text": "ab\\ud800"}\n'),
            r"line 2, has a surrogate without its pair under 'text': \\ud800, character 3, which is no text\nremove",
        ),
        (
            lambda p: p.write_text('{"text": [{"role": "user", "content": "\\udfff"}]}\n'),
            r"line 1, has a surrogate without its pair under 'text': \\udfff, character 1",
        ),
        (
            lambda p: p.write_text('{"text": "a"}\n' + "[" * 100_000 + "\n"),
            r"line 2, is not JSON: it is nested too deeply",
        ),
        (lambda p: p.write_text(""), r"a.jsonl is empty"),
        (lambda p: p.write_text('{"text": ""}\n'), r"no text in .*a.jsonl: every document is empty"),
        (lambda p: p.write_text("Dear reader", "utf-16"), r"line 1, is not JSON"),
        (lambda p: None, r"no file or folder .*a.jsonl"),
        (
            lambda p: p.write_text('{"text": "a"}\n{"text": [{"role": "user", "content": "x"}]}\n'),
            r"a.jsonl has texts and conversations under 'text'",
        ),
        (
            lambda p: p.write_text('{"text": [{"role": "user", "content": "x"}]}\n'),
            r"the documents are conversations, and the tokenizer has no chat template\ngive --tokenizer a Hugging Face",
        ),
    ],
)
def test_bad_jsonl_is_named_and_nothing_is_written(
    write: Callable[[Path], object], message: str, tokenizer: Path, tmp_path: Path
) -> None:
    write(tmp_path / "a.jsonl")
    for options in ({"tokenizer": str(tokenizer)}, {"tokenizer": "bytes"}, {"train_vocab": 257}):
        with pytest.raises(UserError, match=message):
            made(Preprocessing(sources=(str(tmp_path / "a.jsonl"),), prefix=tmp_path / "out", **options))  # type: ignore[arg-type]
        assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"give one of --tokenizer FILE_OR_FOLDER, --tokenizer bytes, and --train-vocab"),
        ({"tokenizer": "bytes", "train_vocab": 300}, r"give one of --tokenizer"),
        ({"tokenizer": "nowhere"}, r"no tokenizer nowhere: there is no such file or folder, and the hub "),
        ({"tokenizer": __file__}, r"test_preprocess.py is not JSON: .*\ncopy the file again"),
        (
            {"tokenizer": str(Path(__file__).parent)},
            r"no tokenizer in .*data\ngive --tokenizer a folder with tokenizer.json",
        ),
        ({"tokenizer": "bytes", "workers": 0}, r"--workers must be at least 1, got 0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str, tmp_path: Path) -> None:
    source = str(_jsonl(tmp_path))
    with pytest.raises(UserError, match=message):
        made(Preprocessing(sources=(source,), prefix=tmp_path / "out", **options))  # type: ignore[arg-type]
    assert not list(tmp_path.glob("out*"))


def test_damaged_parquet_and_saved_splits_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1" + b"x" * 50)
    with pytest.raises(UserError, match=r"a.parquet is not a Parquet file: "):
        documents.open_source(str(tmp_path / "a.parquet"))
    one = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict(train=one, test=one).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(UserError, match=r"both has the splits train, test\ngive one of them: .*both/train"):
        documents.open_source(str(tmp_path / "both"))
    assert documents.open_source(str(tmp_path / "both" / "train")).chunks
