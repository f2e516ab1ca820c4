"""Parser of words: quotes, expansions of variables, arithmetic, and the text of here-documents."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from megaloom.planner.runs.shell.parse.escapes import decoded
from megaloom.planner.runs.shell.parse.source import ShellSyntaxError, Source, text_source
from megaloom.planner.runs.shell.parse.syntax import (
    ArithmeticPart,
    LiteralPart,
    ParameterPart,
    Part,
    Parts,
    Sequence,
    SubstitutionPart,
)
from megaloom.planner.runs.shell.parse.text import Text, literal, missing
from megaloom.planner.runs.words import Unknown

BLANK = " \t\n"
METACHARACTERS = BLANK + ";&|<>()"
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
PARAMETER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?$!-]")
SHORT_PARAMETER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]|[@*#?$!-]")
PLACEHOLDER = re.compile(
    r"(?:(?<=[=:/])<[A-Za-z][^<>\n|&;$`\"']*>"
    r"|<[A-Za-z][^<>\n|&;$`\"']*>(?=[ \t]*(?:\n|\Z|;|\)|&&|\|\|)|[ \t]+\|))"
    r"(?:[ \t]+\([^()\n]*\)(?=[ \t]*(?:\n|\Z)))?"
)
"""`<Specify path>` that people leave in examples: inside of a word, or where bash would miss a redirection's file."""
OPERATORS = (
    ":-", ":=", ":?", ":+", "-", "=", "?", "+", "##", "#", "%%", "%",
    "//", "/#", "/%", "/", ":", "^^", "^", ",,", ",", "@",
)  # fmt: skip


class WordParser:
    """Reads words from a source, from a position onwards. Each method leaves the position after what it read."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.text = source.text
        self.position = 0
        self.escapable = '$`\\"'  # after a backslash inside of double quotes

    def refuse(self, position: int | None = None) -> ShellSyntaxError:
        """Return the error for the line at a position, or at the current one."""
        return ShellSyntaxError(self.source.origin(self.position if position is None else position))

    def peek(self, count: int = 1) -> str:
        """Return the next characters."""
        return self.text[self.position : self.position + count]

    def accept(self, text: str) -> bool:
        """Step over the text if it comes next."""
        if self.text.startswith(text, self.position):
            self.position += len(text)
            return True
        return False

    def program(self, end: str) -> Sequence:
        """Read commands until the closing text. Commands are read by the parser that is derived from this class."""
        raise NotImplementedError

    def parse_source(self, source: Source) -> Sequence:
        """Read all commands of another source, with a parser of the same class."""
        return type(self)(source).program("")

    def word(self, stops: str = METACHARACTERS) -> Parts:
        """Read a word that ends before one of these characters."""
        return self.parts(lambda: self.peek() in stops and not self.opens_word())

    def opens_word(self) -> bool:
        """Return True before a bracket that is part of a word: `<(…)`, `>(…)` or a placeholder such as `<path>`."""
        return self.peek(2) in ("<(", ">(") or bool(PLACEHOLDER.match(self.text, self.position))

    def parts(self, ended: Callable[[], bool], double: bool = False, quotes: bool = True) -> Parts:
        """Read parts of a word until `ended`, as inside of double quotes or outside; `quotes`: quotes are special."""
        result: list[Part] = []
        start = self.position

        def flush() -> None:
            if start < self.position:
                result.append(LiteralPart(self.source.pieces(start, self.position), double))

        while self.position < len(self.text) and not ended():
            letter = self.peek()
            if not (letter in "\\$`" or (letter in "\"'" and quotes) or (letter in "<>" and not double)):
                self.position += 1
                continue
            flush()
            before = self.position
            result += self._special(letter, double, quotes)
            if self.position == before:  # a lone `$`, `<` or backslash is literal
                self.position += 1
                result.append(LiteralPart(self.source.pieces(before, self.position), double))
            start = self.position
        flush()
        return tuple(result)

    def _special(self, letter: str, double: bool, quotes: bool) -> Parts:
        if letter == "\\":
            return self._backslash(double)
        if letter == '"' and not double:
            return self._double_quoted()
        if letter == '"':  # inside of `${…}` that stands in double quotes
            self.position += 1
            inside = self.parts(lambda: self.peek() == '"', double=True, quotes=False)
            self.position += 1
            return inside
        if letter == "'":
            return () if double else self._single_quoted()
        if letter == "`":
            return self._backquoted(double)
        if letter == "$":
            return self._dollar(double)
        return self._process(letter)

    def _process(self, letter: str) -> Parts:
        origin = self.source.origin(self.position)
        if match := PLACEHOLDER.match(self.text, self.position):
            self.position = match.end()
            return (LiteralPart(missing(Unknown("<…>", "placeholder", origin)), True),)
        if self.peek(2) != letter + "(":
            return ()
        self.position += 2
        body = self.program(")")
        self.position += 1
        return (SubstitutionPart(body, origin, True, as_file=True),)

    def _backslash(self, double: bool) -> Parts:
        following = self.text[self.position + 1 : self.position + 2]
        if following == "\n":
            self.position += 2
            return (LiteralPart((), False),) if double else ()
        if not following or (double and following not in self.escapable):
            return ()
        self.position += 2
        return (LiteralPart(self.source.pieces(self.position - 1, self.position), True),)

    def _single_quoted(self) -> Parts:
        end = self.text.find("'", self.position + 1)
        if end < 0:
            raise self.refuse()
        text = self.source.pieces(self.position + 1, end)
        self.position = end + 1
        return (LiteralPart(text, True),)

    def _double_quoted(self) -> Parts:
        start = self.position
        self.position += 1
        inside = self.parts(lambda: self.peek() == '"', double=True, quotes=False)
        if not self.accept('"'):
            raise self.refuse(start)
        return inside or (LiteralPart((), True),)

    def _backquoted(self, double: bool) -> Parts:
        origin, start = self.source.origin(self.position), self.position + 1
        end = start
        text: Text = ()
        while self.text[end : end + 1] != "`":
            if end >= len(self.text):
                raise self.refuse(start)
            if self.text[end] == "\\" and self.text[end + 1 : end + 2] in ("`", "\\", "$", '"' if double else "`"):
                end += 1
            text += self.source.pieces(end, end + 1)
            end += 1
        self.position = end + 1
        return (SubstitutionPart(self.parse_source(text_source(text, origin)), origin, double),)

    def _dollar(self, double: bool) -> Parts:
        start, origin = self.position, self.source.origin(self.position)
        self.position += 1
        if self.accept("(("):
            after = self.position
            expression = self.arithmetic("))")
            if self.accept("))"):
                return (ArithmeticPart(expression, origin, double),)
            self.position = after - 1  # `$((…) …)`: commands in a subshell
            body = self.program(")")
            self.position += 1
            return (SubstitutionPart(body, origin, double),)
        if self.accept("("):
            body = self.program(")")
            self.position += 1
            return (SubstitutionPart(body, origin, double),)
        if self.accept("["):
            expression = self.arithmetic("]")
            self.position += 1
            return (ArithmeticPart(expression, origin, double),)
        if self.accept("{"):
            return (self._braces(double),)
        if self.peek() == "'" and not double:
            return self._escaped()
        if self.peek() == '"' and not double:
            return self._double_quoted()
        if name := SHORT_PARAMETER.match(self.text, self.position):
            self.position = name.end()
            return (ParameterPart(name[0], origin, double),)
        self.position = start
        return ()

    def arithmetic(self, end: str) -> Parts:
        """Read an integer expression until the closing text outside of its own brackets."""
        depth = 0

        def ended() -> bool:
            nonlocal depth
            if depth == 0 and self.text.startswith(end, self.position):
                return True
            depth += {"(": 1, ")": -1, "[": 1, "]": -1}.get(self.peek(), 0)
            return depth < 0

        return self.parts(ended, double=True, quotes=True)

    def _escaped(self) -> Parts:
        start = self.position + 1
        end = start
        while (letter := self.text[end : end + 1]) != "'":
            if not letter:
                raise self.refuse(start)
            end += 2 if letter == "\\" else 1
        self.position = end + 1
        return (LiteralPart(literal(decoded(self.text[start:end]), self.source.origin(start)), True),)

    def _braces(self, double: bool) -> ParameterPart:
        start = self.position
        prefix: Literal["", "#", "!"] = ""
        if self.peek() in ("#", "!") and self.peek(2)[1:] not in ("}", ""):
            rest = self.peek(2)[1:]
            if rest not in ":%/+=?^," and not (rest == "-" and self.peek(3)[2:] != "}"):
                prefix = "#" if self.peek() == "#" else "!"
                self.position += 1
        name = PARAMETER.match(self.text, self.position)
        if not name:
            raise self.refuse(start)
        self.position = name.end()
        index = None
        if self.accept("["):
            index = self.parts(lambda: self.peek() == "]", double=True)
            self.position += 1
        operator = next((o for o in OPERATORS if self.accept(o)), "")
        arguments = self._arguments(operator, double)
        if not self.accept("}"):
            raise self.refuse(start)
        return ParameterPart(
            name[0],
            self.source.origin(start),
            double,
            index,
            prefix,
            operator,
            arguments,
        )

    def _arguments(self, operator: str, double: bool) -> tuple[Parts, ...]:
        if not operator:
            return ()
        as_quoted = double and operator.lstrip(":") in ("-", "=", "?", "+")
        if operator == ":":
            first = self.parts(self._before(":}"), double=True)
            return (first, self.parts(self._before("}"), double=True)) if self.accept(":") else (first,)
        if operator[0] == "/":
            first = self.parts(self._before("/}"))
            return (first, self.parts(self._before("}"), double)) if self.accept("/") else (first,)
        return (self.parts(self._before("}"), as_quoted),)

    def _before(self, letters: str) -> Callable[[], bool]:
        return lambda: self.peek() in letters
