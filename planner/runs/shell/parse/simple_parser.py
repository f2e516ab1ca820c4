"""Parser of simple commands: assignments, words, redirections with their here-documents, and `[[ … ]]`."""

from __future__ import annotations

import re

from megaloom.planner.runs.shell.parse.source import Source, text_source
from megaloom.planner.runs.shell.parse.syntax import (
    Assignment,
    DoubleBracket,
    LiteralPart,
    Node,
    Parts,
    Redirection,
    Simple,
)
from megaloom.planner.runs.shell.parse.text import known_text
from megaloom.planner.runs.shell.parse.word_parser import WordParser

ASSIGNED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?=\+?=|\[)")
REDIRECTION = re.compile(r"([0-9]*|\{[A-Za-z_]\w*\})(<<<|<<-|<<|<>|<&|>>|>&|>\||<(?!\()|>(?!\()|&>>|&>)")
PLAIN_WORD = re.compile(r"[^\s;&|<>()]+")
DECLARING = frozenset({"declare", "typeset", "local", "export", "readonly"})


class SimpleParser(WordParser):
    """Reads simple commands from a source."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.waiting: list[tuple[Redirection, str, bool, bool]] = []  # here-documents: end, strips tabs, literal

    def space(self, lines: bool = False) -> None:
        """Step over blanks and comments, and over line ends if `lines`."""
        while True:
            if self.peek() in (" ", "\t"):
                self.position += 1
            elif self.peek(2) == "\\\n":
                self.position += 2
            elif self.peek() == "#":
                end = self.text.find("\n", self.position)
                self.position = len(self.text) if end < 0 else end
            elif self.peek() == "\n" and lines:
                self.newline()
            else:
                return

    def newline(self) -> None:
        """Step over the end of a line, and over the here-documents that follow it."""
        self.position += 1
        waiting, self.waiting = self.waiting, []
        for redirection, end, strip, is_literal in waiting:
            redirection.document = self._document(end, strip, is_literal)

    def _document(self, end: str, strip: bool, is_literal: bool) -> Parts:
        start = self.position
        while self.position < len(self.text):
            after = self.text.find("\n", self.position)
            after = len(self.text) if after < 0 else after
            line = self.text[self.position : after]
            if (line.lstrip("\t") if strip else line) == end:
                stop, self.position = self.position, min(after + 1, len(self.text))
                break
            self.position = after + 1
        else:
            stop = self.position = len(self.text)
        self.position -= self.text[self.position - 1 : self.position] == "\n"  # the caller's line goes on there
        text = self.source.pieces(start, stop)
        if strip:
            text = tuple(type(p)(re.sub(r"(?m)^\t+", "", p.text), p.origin, p.unknown, p.either) for p in text)
        if is_literal:
            return (LiteralPart(text, True),)
        inner = type(self)(text_source(text, self.source.origin(start)))
        inner.escapable = "$`\\"
        return inner.parts(lambda: False, double=True, quotes=False)

    def reserved(self) -> str:
        """Return the next word if it is plain, without stepping over it."""
        match = PLAIN_WORD.match(self.text, self.position)
        return match[0] if match else ""

    def some_word(self) -> Parts:
        """Read a word that must come next."""
        word = self.word()
        if not word:
            raise self.refuse()
        return word

    def redirection(self) -> Redirection | None:
        """Read a redirection if one comes next."""
        match = REDIRECTION.match(self.text, self.position)
        if not match or self.opens_word():
            return None
        self.position = match.end()
        self.space()
        start = self.position
        target = self.some_word()
        result = Redirection(match[2], match[1], target)
        if match[2] in ("<<", "<<-"):
            written = self.text[start : self.position]
            end = "".join(known_text(p.text) or "" for p in target if isinstance(p, LiteralPart))
            self.waiting.append((result, end, match[2] == "<<-", any(c in written for c in "\\'\"")))
        return result

    def assignment(self) -> Assignment | None:
        """Read an assignment if one comes next."""
        start = self.position
        name = ASSIGNED.match(self.text, start)
        if not name:
            return None
        self.position = name.end()
        index = None
        if self.accept("["):
            index = self.parts(lambda: self.peek() == "]", double=True, quotes=True)
            self.position += 1
        append = self.accept("+=")
        if not append and not self.accept("="):
            self.position = start
            return None
        origin = self.source.origin(start)
        if self.peek() == "(":
            return Assignment(name[0], origin, self._items(), index, append, array=True)
        return Assignment(name[0], origin, self.word(), index, append)

    def _items(self) -> tuple[tuple[Parts | None, Parts], ...]:
        items: list[tuple[Parts | None, Parts]] = []
        self.position += 1
        while True:
            self.space(lines=True)
            if self.accept(")"):
                return tuple(items)
            start, index = self.position, None
            if self.accept("["):
                index = self.parts(lambda: self.peek() in "]\n ", double=True, quotes=True)
                if self.accept("]="):
                    items.append((index, self.word()))
                    continue
                self.position = start
            items.append((None, self.some_word()))

    def simple(self) -> Node:
        """Read a simple command."""
        origin = self.source.origin(self.position)
        assignments: list[Assignment] = []
        words: list[Parts | Assignment] = []
        redirections: list[Redirection] = []
        declares = False
        while True:
            self.space()
            if redirection := self.redirection():
                redirections.append(redirection)
            elif self.peek() in ("", "\n") or self.peek() in ";&|()":
                break
            elif not words and (assignment := self.assignment()):
                assignments.append(assignment)
            elif declares and (assignment := self.assignment()):
                words.append(assignment)
            else:
                start = self.position
                words.append(self.some_word())
                declares |= len(words) == 1 and self.text[start : self.position] in DECLARING
        if not (assignments or words or redirections):
            raise self.refuse()
        return Simple(tuple(assignments), tuple(words), tuple(redirections), origin)

    def double_bracket(self) -> Node:
        """Read `[[ … ]]`."""
        origin = self.source.origin(self.position)
        self.position += 2
        tokens: list[Parts | str] = []
        while True:
            self.space(lines=True)
            if self.accept("]]"):
                return DoubleBracket(tuple(tokens), origin)
            operator = next((o for o in ("&&", "||", "(", ")", "<", ">") if self.accept(o)), "")
            if operator:
                tokens.append(operator)
                continue
            plain = self.reserved()
            tokens.append(self.some_word())
            if plain == "=~":
                self.space()
                tokens.append(self._regular_expression())

    def _regular_expression(self) -> Parts:
        depth = 0

        def ended() -> bool:
            nonlocal depth
            letter = self.peek()
            depth += {"(": 1, ")": -1}.get(letter, 0)
            return letter in " \t\n" and depth <= 0

        return self.parts(ended)
