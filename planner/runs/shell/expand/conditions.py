"""Conditions: `test`, `[ … ]` and `[[ … ]]`, of which the outcome may be unknown."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from attrs import evolve, frozen

from megaloom.planner.runs.shell.expand.patterns import CLASSES, matches
from megaloom.planner.runs.shell.expand.state import Status
from megaloom.planner.runs.shell.parse.text import Text, assumption, cause, displayed, known_text, shown
from megaloom.planner.runs.words import Origin, Unknown

FILE_TESTS = frozenset(f"-{c}" for c in "abcdefghkprstuwxGLNOS")
BINARY = frozenset({"=", "==", "!=", "<", ">", "=~", "-eq", "-ne", "-lt", "-le", "-gt", "-ge", "-nt", "-ot", "-ef"})
NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}


@frozen
class Surroundings:
    """Answers to questions that a condition asks of the script: is a file there, a variable set; the value of a number.

    A file is there (True), or it is not known whether (None). A number that is not known is an Unknown.
    """

    file_exists: Callable[[str], bool | None]
    is_set: Callable[[str], Status]
    number: Callable[[Text], int | Unknown]
    match: Callable[[Sequence[str]], None]  # is given the groups of a regular expression


class BracketCondition:
    """Reads a condition from its words. In `[[ ]]` operators are strings and operands texts; in `[ ]` all are texts."""

    def __init__(self, tokens: Sequence[Text | str], double: bool, origin: Origin, around: Surroundings) -> None:
        self.tokens = list(tokens)
        self.double = double
        self.origin = origin
        self.around = around

    def outcome(self) -> Status:
        """Return the status: 0 if the condition is true, 1 if it is false, 2 if it is none."""
        if not self.tokens:
            return Status(1)
        result = self._either()
        return result if not self.tokens else Status(2)

    def _next(self, ahead: int = 0) -> str:
        if len(self.tokens) <= ahead:
            return ""
        token = self.tokens[ahead]
        if isinstance(token, str):
            return token
        return (known_text(token) or "") if not self.double or not any(p.quoted for p in token) else ""

    def _either(self) -> Status:
        result = self._both()
        while self._next() == ("||" if self.double else "-o"):
            self.tokens.pop(0)
            result = _combined(result, self._both(), 0)
        return result

    def _both(self) -> Status:
        result = self._negated()
        while self._next() == ("&&" if self.double else "-a"):
            self.tokens.pop(0)
            result = _combined(result, self._negated(), 1)
        return result

    def _negated(self) -> Status:
        if self._next() == "!" and len(self.tokens) > 1 and self._next(1) not in BINARY - {"="}:
            self.tokens.pop(0)
            return self._negated().negated()
        if self._next() == "(" and self._next(1) not in BINARY:
            self.tokens.pop(0)
            result = self._either()
            if self._next() != ")":
                return Status(2)
            self.tokens.pop(0)
            return result
        return self._primary()

    def _operand(self) -> Text:
        token = self.tokens.pop(0) if self.tokens else ()
        return token if not isinstance(token, str) else ()

    def _primary(self) -> Status:
        if self._next(1) in BINARY and len(self.tokens) >= 3:
            left, operator, _ = self._operand(), self._next(), self.tokens.pop(0)
            return self._compare(left, operator, self._operand())
        operator = self._next()
        ends = self._next(1) in ("-a", "-o", "&&", "||", ")")
        if len(self.tokens) > 1 and operator[:1] == "-" and len(operator) == 2 and not ends:
            self.tokens.pop(0)
            return self._unary(operator, self._operand())
        return _filled(self._operand())

    def _unary(self, operator: str, operand: Text) -> Status:
        if operator in ("-n", "-z"):
            return _filled(operand) if operator == "-n" else _filled(operand).negated()
        if operator in ("-v", "-R"):
            name = known_text(operand)
            return Status(None, cause(operand)) if name is None else self.around.is_set(name)
        if operator in FILE_TESTS:
            path = known_text(operand)
            if path and self.around.file_exists(path):
                return Status(0)
            if path == "":
                return Status(1)
            return Status(None, Unknown(displayed(operand), "file", self.origin))
        return Status(None, Unknown(operator, "condition", self.origin))

    def _compare(self, left: Text, operator: str, right: Text) -> Status:
        assumed = assumption(left) or assumption(right)
        if operator in NUMBERS:
            first, second = self.around.number(left), self.around.number(right)
            if isinstance(first, Unknown) or isinstance(second, Unknown):
                return Status(None, first if isinstance(first, Unknown) else second)  # type: ignore[arg-type]
            return Status(int(not NUMBERS[operator](first, second)), assumed=assumed)
        if operator in ("-nt", "-ot", "-ef"):
            return Status(None, Unknown(displayed(left), "file", self.origin))
        one, two = known_text(left), known_text(right)
        if one is None or two is None:
            differ = operator in ("=", "==", "!=") and _must_differ(left, right)
            return Status(int(operator != "!=")) if differ else Status(None, cause(left) or cause(right))
        if operator == "=~":
            return self._regular(one, right)
        if operator in ("<", ">"):
            return Status(int(not (one < two if operator == "<" else one > two)))
        is_equal = matches(one, right) if self.double else one == two
        return Status(int(is_equal == (operator == "!=")), assumed=assumed)

    def _regular(self, text: str, pattern: Text) -> Status:
        regex = "".join(re.escape(p.text) if p.quoted else p.text for p in pattern)
        for name, letters in CLASSES.items():
            regex = regex.replace(f"[:{name}:]", letters)
        try:
            found = re.search(regex, text, re.DOTALL)
        except re.error:
            return Status(None, Unknown("=~", "condition", self.origin))
        if found:
            self.around.match([found[0], *(g or "" for g in found.groups())])
        return Status(int(not found))


def _filled(text: Text) -> Status:
    """Return the status of `-n`: a variable that nobody gave counts as empty, as `${X:-…}` takes it."""
    if shown(text):
        return Status(0)
    unknown = cause(text)
    if unknown is None:
        return Status(1, assumed=assumption(text))
    absent = len(text) == 1 and text[0].unset
    return Status(1, assumed=unknown) if absent else Status(None, unknown)


def _must_differ(left: Text, right: Text) -> bool:
    """Return True if every outcome of an unknown text differs from the other text."""
    for text, other in ((left, right), (right, left)):
        plain = known_text(other)
        if plain is not None and len(text) == 1 and text[0].either:
            outcomes = [" ".join(known_text(w) or "\0" for w in words) for words in text[0].either]
            if not any("\0" in o or matches(o, other) for o in outcomes):
                return True
    return False


def _combined(left: Status, right: Status, decisive: int) -> Status:
    """Return the status of two conditions; `decisive` is the status of one that decides alone."""
    for status in (left, right):
        if status.code == decisive and not status.assumed:
            return status
    if left.code is not None and right.code is not None:
        one = next((s for s in (left, right) if s.code == decisive), right)
        return evolve(one, assumed=left.assumed or right.assumed)
    return left if left.code is None else right
