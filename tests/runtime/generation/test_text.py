"""Prompts are encoded as transformers does, and text is shown while it is written: whole characters, and no end."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from megaloom.dsl.errors import UserError
from megaloom.runtime.data.tokenizer import END_OF_TEXT, train_bpe
from megaloom.runtime.generation.text import PromptText, TextStream
from tests.support.models.hugging_face import transformers

BYTES = PromptText.load("bytes")


def shown(text: str, *stop: str) -> list[str]:
    """The pieces that a stream shows of a text, byte by byte."""
    pieces: list[str] = []
    stream = TextStream(BYTES, stop, pieces.append)
    for byte in text.encode():
        stream.add(byte)
    stream.end()
    return pieces


def test_characters_are_shown_whole() -> None:
    assert shown("né €!") == ["n", "é", " ", "€", "!"]


def test_a_possible_end_waits() -> None:
    assert shown("ab\n\nc", "\n\n") == ["a", "b"]
    assert shown("ab\nc", "\n\n") == ["a", "b", "\nc"]
    assert shown("ab\n", "\n\n") == ["a", "b", "\n"]
    assert BYTES.written(b"ab STOP c", (" STOP", "b S")) == "a"


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer that begins each text with a special token, and has a chat template."""
    train_bpe(["hello world, hello user and assistant"] * 9, 270, tmp_path)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 0)])
    backend.save(str(tmp_path / "tokenizer.json"))
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
    return tmp_path


def test_prompts_are_encoded_as_transformers_does(folder: Path) -> None:
    text, theirs = PromptText.load(str(folder)), transformers.AutoTokenizer.from_pretrained(folder)
    assert text.encode("hello world") == tuple(theirs("hello world")["input_ids"])
    assert text.encode("hello world")[0] == 0
    rendered = "<user>hello world<assistant>"
    assert text.chat("hello world") == tuple(theirs(rendered, add_special_tokens=False)["input_ids"])
    assert text.decode([*text.encode("hello world"), 9999]) == "hello world"  # no special or unknown tokens


def test_a_token_is_given_by_name_or_id(folder: Path) -> None:
    text = PromptText.load(str(folder))
    assert (text.token(END_OF_TEXT, 270), text.token("269", 270)) == (0, 269)
    with pytest.raises(UserError, match="is beyond the model's vocabulary of 270 tokens"):
        text.token("270", 270)
    with pytest.raises(UserError) as refused:
        text.token("<|endoftxt|>", 270)
    assert f"did you mean {END_OF_TEXT}?\ngive the name of a token, or an id" in str(refused.value)
