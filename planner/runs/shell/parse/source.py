"""The source of a parser: characters, each with the place that it comes from."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from attrs import field, frozen

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.shell.parse.text import Piece, Text
from megaloom.planner.runs.words import Origin

GAP = "\ue000"
"""A character of Unicode's private area that stands for an unknown piece."""


class ShellSyntaxError(UserError):
    """A line that this reader does not understand. Its text is never in the message: it may hold a credential."""

    def __init__(self, origin: Origin) -> None:
        super().__init__(f"{origin}: this line is shell syntax that the reader does not know")


@frozen
class Source:
    """The characters of a file, or of a text that a script evaluates."""

    text: str
    starts: tuple[int, ...] = field(repr=False)  # where the pieces begin
    origins: tuple[Origin, ...] = field(repr=False)
    gaps: Mapping[int, Piece] = field(repr=False, hash=False)  # unknown pieces, by position

    def origin(self, position: int) -> Origin:
        """Return the place of the character at this position."""
        return self.origins[max(0, bisect_right(self.starts, position) - 1)]

    def pieces(self, start: int, end: int) -> Text:
        """Return the characters from start to end, one piece for each origin and each unknown."""
        result: list[Piece] = []
        for position in range(start, end):
            if position in self.gaps:
                result.append(self.gaps[position])
                continue
            origin, letter = self.origin(position), self.text[position]
            if result and result[-1].origin == origin and not result[-1].unknown:
                result[-1] = Piece(result[-1].text + letter, origin)
            else:
                result.append(Piece(letter, origin))
        return tuple(result)


def file_source(text: str, path: str) -> Source:
    """Return the source of a file's text: each line is a place."""
    lines = text.replace("\r\n", "\n").replace(GAP, "\ufffd").split("\n")
    starts, position = [], 0
    for line in lines:
        starts.append(position)
        position += len(line) + 1
    origins = tuple(Origin(path, n + 1) for n in range(len(lines)))
    return Source("\n".join(lines), tuple(starts), origins, {})


def text_source(text: Text, origin: Origin) -> Source:
    """Return the source of a text that a script evaluates; the origin is used where it is empty."""
    starts, origins, position, letters = [], [], 0, ""
    gaps: dict[int, Piece] = {}
    for piece in text:
        starts.append(position)
        origins.append(piece.origin)
        if piece.unknown:
            gaps[position] = piece
        letters += GAP if piece.unknown else piece.text.replace(GAP, "\ufffd")
        position += len(piece)
    return Source(letters, tuple(starts) or (0,), tuple(origins) or (origin,), gaps)
