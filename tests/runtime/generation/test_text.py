"""Text while it is written: whole characters only, and nothing of a text that ends it."""

from megaloom.runtime.generation.text import PromptText, TextStream

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
