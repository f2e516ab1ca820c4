"""Text whose pieces know where they come from, and what of a text is not known.

A variable of a script holds such a text, so that a word of a command can name the line where its value stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import evolve, frozen

from megaloom.planner.runs.words import Origin, Unknown, Word


@frozen
class Piece:
    """A run of characters with one origin, or a part that is not known.

    An unknown piece that is not quoted may stand for several words or none. `either` then has the words that it stands
    for under each outcome of the condition that is not known.
    """

    text: str
    origin: Origin
    unknown: Unknown | None = None
    either: tuple[tuple[Text, ...], ...] = ()
    assumed: Unknown | None = None  # the text is what holds while this variable or argument is not given
    quoted: bool = False
    unset: bool = False  # unknown since no line sets the variable and nobody gave it

    def __len__(self) -> int:
        return len(self.text) if self.unknown is None else 1


Text = tuple[Piece, ...]


def literal(text: str, origin: Origin) -> Text:
    """Return a text of one known piece, or an empty one."""
    return (Piece(text, origin),) if text else ()


def missing(unknown: Unknown, unset: bool = False) -> Text:
    """Return a text of which nothing is known; `unset`: because nobody gave the variable or argument."""
    return (Piece("", unknown.origin, unknown, unset=unset),)


def cause(text: Text) -> Unknown | None:
    """Return the first unknown of a text, or None if all of it is known."""
    return next((p.unknown for p in text if p.unknown), None)


def assumption(text: Text) -> Unknown | None:
    """Return what was taken as not given for this text to hold, if anything."""
    return next((p.assumed for p in text if p.assumed), None)


def known_text(text: Text) -> str | None:
    """Return the characters of a text, or None if some of them are not known."""
    return None if cause(text) else shown(text)


def shown(text: Text) -> str:
    """Return the known characters of a text; what is not known is left out."""
    return "".join(p.text for p in text)


def size(text: Text) -> int:
    """Return the number of characters, counting an unknown piece as one."""
    return sum(map(len, text))


def cut(text: Text, start: int, end: int | None = None) -> Text:
    """Return the characters from start to end, counting an unknown piece as one character."""
    end = size(text) if end is None else end
    result, position = [], 0
    for piece in text:
        first, last = max(start - position, 0), min(end - position, len(piece))
        if first < last:
            result.append(piece if piece.unknown else evolve(piece, text=piece.text[first:last]))
        position += len(piece)
    return tuple(result)


def joined(texts: Iterable[Text], separator: str = " ") -> Text:
    """Return the texts one after the other, with the separator between them."""
    result: list[Piece] = []
    for number, text in enumerate(texts):
        if number and separator:
            before = result[-1].origin if result else text[0].origin if text else Origin("", 1)
            result.append(Piece(separator, before))
        result += text
    return tuple(result)


def quoted(text: Text, yes: bool = True) -> Text:
    """Return the text with every piece marked as quoted, or as not quoted."""
    return tuple(p if p.quoted == yes else evolve(p, quoted=yes) for p in text)


def same(left: Text, right: Text) -> bool:
    """Return True for texts with the same characters and the same unknowns, wherever they come from."""
    return _letters(left) == _letters(right)


def _letters(text: Text) -> list[str | Unknown]:
    result: list[str | Unknown] = []
    for piece in text:
        if piece.unknown:
            result.append(piece.unknown)
        else:
            result += piece.text
    return result


def split_words(text: Text, separators: str = " \t\n") -> list[Text]:
    """Split a text as bash splits an unquoted expansion: at runs of white space, and at each other separator.

    Quoted pieces are not split.
    """
    return [cut(text, *bounds) for bounds in _bounds(text, separators)]


def _bounds(text: Text, separators: str) -> list[tuple[int, int]]:
    letters = [c for p in text for c in ("?" if p.unknown else "?" * len(p) if p.quoted else p.text)]
    blank = {c for c in separators if c in " \t\n"}
    hard = set(separators) - blank
    bounds: list[tuple[int, int]] = []
    position = 0
    while position < len(letters) and letters[position] in blank:
        position += 1
    while position < len(letters):
        start = position
        while position < len(letters) and letters[position] not in blank | hard:
            position += 1
        bounds.append((start, position))
        while position < len(letters) and letters[position] in blank:
            position += 1
        if position < len(letters) and letters[position] in hard:
            position += 1
            while position < len(letters) and letters[position] in blank:
                position += 1
    return bounds


def merged(left: Text, right: Text, unknown: Unknown) -> Text:
    """Return what two outcomes of a condition agree on: whole words at both ends, and between them one unknown."""
    if same(left, right):
        return left
    before, after = common_ends(_letters(left), _letters(right))
    letters = _letters(left)
    while before and not (isinstance(last := letters[before - 1], str) and last.isspace()):
        before -= 1
    while after and not (isinstance(first := letters[-after], str) and first.isspace()):
        after -= 1
    middles = cut(left, before, size(left) - after), cut(right, before, size(right) - after)
    gap = open_choice([split_words(quoted(m, False)) for m in middles], unknown)
    return (*cut(left, 0, before), *gap, *cut(left, size(left) - after))


def open_choice(outcomes: Iterable[Sequence[Text]], unknown: Unknown) -> Text:
    """Return a text that stands for the words of one of these outcomes; outcomes that are choices are spread out."""
    either: list[tuple[Text, ...]] = []
    for words in outcomes:
        only = words[0] if len(words) == 1 and len(words[0]) == 1 else ()
        for outcome in only[0].either if only and only[0].either else (tuple(words),):
            if not any(len(outcome) == len(o) and all(map(same, outcome, o)) for o in either):
                either.append(outcome)
    return (Piece("", unknown.origin, unknown, tuple(either)),)


def common_ends(left: Sequence[object], right: Sequence[object]) -> tuple[int, int]:
    """Return how many items two sequences share at their beginning, and at their end."""
    most = min(len(left), len(right))
    before = 0
    while before < most and left[before] == right[before]:
        before += 1
    after = 0
    while after < most - before and left[-1 - after] == right[-1 - after]:
        after += 1
    return before, after


def unknowns(text: Text) -> tuple[Unknown, ...]:
    """Return every unknown of a text once."""
    return tuple(dict.fromkeys(p.unknown for p in text if p.unknown))


def as_word(text: Text, origin: Origin) -> Word:
    """Return a word of a command: its known characters, the origin of the first piece, and what is not known.

    `origin` is that of an empty word.
    """
    text = tuple(p for p in text if p.text or p.unknown)
    either = tuple(tuple(as_word(w, origin) for w in words) for words in text[0].either) if len(text) == 1 else ()
    return Word(shown(text), text[0].origin if text else origin, unknowns(text), either)


def displayed(text: Text) -> str:
    """Return the text for a message: an unknown piece is shown as `$NAME`."""
    return "".join(f"${p.unknown.name}" if p.unknown else p.text for p in text)
