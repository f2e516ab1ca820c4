"""Integer expressions of `$((…))`, `((…))` and `let`."""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import and_, ge, gt, le, lt, mul, or_, xor

from attrs import frozen

from megaloom.planner.runs.words import Unknown

_TOKEN = re.compile(
    r"\s*(\d+#[0-9a-zA-Z]+|0[xX][0-9a-fA-F]+|\d+|[A-Za-z_]\w*|\*\*|<<=|>>=|[-+*/%&|^]=|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||"
    r"[-+*/%<>=!~&|^?:(),\[\]])"
)
_BITS = 64


class ArithmeticUnknownError(Exception):
    """The value depends on something that is not known."""

    def __init__(self, unknown: Unknown) -> None:
        super().__init__(unknown.name)
        self.unknown = unknown


class ArithmeticSyntaxError(Exception):
    """The text is not an integer expression."""


@frozen
class Variables:
    """Access to the variables of a script: by name, and by index or None."""

    read: Callable[[str, int | None], int]
    write: Callable[[str, int | None, int], None]


def _wrapped(value: int) -> int:
    return (value + (1 << (_BITS - 1))) % (1 << _BITS) - (1 << (_BITS - 1))


def _divide(left: int, right: int) -> int:
    if right == 0:
        raise ArithmeticSyntaxError
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


def _remainder(left: int, right: int) -> int:
    return left - right * _divide(left, right)


def _power(left: int, right: int) -> int:
    if right < 0:
        raise ArithmeticSyntaxError
    return int(pow(left % (1 << _BITS), right, 1 << _BITS))


def _shift_left(left: int, right: int) -> int:
    return left << (right % _BITS)


def _shift_right(left: int, right: int) -> int:
    return left >> (right % _BITS)


_LEVELS: tuple[dict[str, Callable[[int, int], int]], ...] = (
    {"|": or_},
    {"^": xor},
    {"&": and_},
    {"==": lambda a, b: int(a == b), "!=": lambda a, b: int(a != b)},
    {"<": lt, ">": gt, "<=": le, ">=": ge},
    {"<<": _shift_left, ">>": _shift_right},
    {"+": lambda a, b: a + b, "-": lambda a, b: a - b},
    {"*": mul, "/": _divide, "%": _remainder},
)
_OPERATIONS = {k: v for level in _LEVELS for k, v in level.items()}


class _Expression:
    def __init__(self, text: str, variables: Variables) -> None:
        self.tokens: list[str] = []
        position = 0
        text = text.rstrip()
        while position < len(text):
            match = _TOKEN.match(text, position)
            if not match:
                raise ArithmeticSyntaxError
            self.tokens.append(match[1])
            position = match.end()
        self.variables = variables
        self.live = True  # False inside of an operand that is not evaluated

    def next(self) -> str:
        return self.tokens[0] if self.tokens else ""

    def take(self, token: str = "") -> str:
        if not self.tokens or (token and self.tokens[0] != token):
            raise ArithmeticSyntaxError
        return self.tokens.pop(0)

    def skipped(self, skip: bool, operand: Callable[[], int]) -> int:
        before, self.live = self.live, self.live and not skip
        try:
            return operand()
        finally:
            self.live = before

    def comma(self) -> int:
        value = self.ternary()
        while self.next() == ",":
            self.take()
            value = self.ternary()
        return value

    def ternary(self) -> int:
        condition = self.either()
        if self.next() != "?":
            return condition
        self.take()
        yes = self.skipped(not condition, self.ternary)
        self.take(":")
        no = self.skipped(bool(condition), self.ternary)
        return yes if condition else no

    def either(self) -> int:
        value = self.both()
        while self.next() == "||":
            self.take()
            right = self.skipped(bool(value), self.both)
            value = int(bool(value or right))
        return value

    def both(self) -> int:
        value = self.binary(0)
        while self.next() == "&&":
            self.take()
            right = self.skipped(not value, lambda: self.binary(0))
            value = int(bool(value and right))
        return value

    def binary(self, level: int) -> int:
        if level == len(_LEVELS):
            return self.power()
        value = self.binary(level + 1)
        while self.next() in _LEVELS[level]:
            operation = _LEVELS[level][self.take()]
            right = self.binary(level + 1)
            value = _wrapped(int(operation(value, right))) if self.live else 0
        return value

    def power(self) -> int:
        value = self.unary()
        if self.next() == "**":
            self.take()
            right = self.power()
            value = _wrapped(_power(value, right)) if self.live else 0
        return value

    def unary(self) -> int:
        token = self.next()
        if token in ("+", "-", "!", "~"):
            self.take()
            value = self.unary()
            return {"+": value, "-": _wrapped(-value), "!": int(not value), "~": ~value}[token]
        if token in ("++", "--"):
            self.take()
            name, index = self.name()
            return self.store(name, index, self.load(name, index) + (1 if token == "++" else -1))
        if token == "(":
            self.take()
            value = self.comma()
            self.take(")")
            return value
        if token and (token[0].isalpha() or token[0] == "_"):
            return self.variable()
        return _number(self.take())

    def variable(self) -> int:
        name, index = self.name()
        operator = self.next()
        if operator == "=":
            self.take()
            return self.store(name, index, self.ternary())
        if operator in ("++", "--"):
            self.take()
            before = self.load(name, index)
            self.store(name, index, before + (1 if operator == "++" else -1))
            return before
        if len(operator) > 1 and operator[-1] == "=" and operator[:-1] in _OPERATIONS:
            self.take()
            right = self.ternary()
            value = _OPERATIONS[operator[:-1]](self.load(name, index), right) if self.live else 0
            return self.store(name, index, value)
        return self.load(name, index)

    def name(self) -> tuple[str, int | None]:
        name = self.take()
        if not (name[0].isalpha() or name[0] == "_"):
            raise ArithmeticSyntaxError
        index = None
        if self.next() == "[":
            self.take()
            index = self.comma()
            self.take("]")
        return name, index

    def load(self, name: str, index: int | None) -> int:
        return self.variables.read(name, index) if self.live else 0

    def store(self, name: str, index: int | None, value: int) -> int:
        if self.live:
            self.variables.write(name, index, _wrapped(value))
        return _wrapped(value)


def _number(token: str) -> int:
    try:
        if "#" in token:
            base, digits = token.split("#")
            return int(digits, int(base))
        if token[:2] in ("0x", "0X"):
            return int(token, 16)
        return int(token, 8) if token.startswith("0") and token != "0" else int(token)
    except ValueError:
        raise ArithmeticSyntaxError from None


def evaluate_arithmetic(text: str, variables: Variables) -> int:
    """Return the value of an integer expression, as bash computes it: 64 bits, division towards zero.

    Raises ArithmeticUnknownError where a variable is not known, ArithmeticSyntaxError where the text is no expression.
    """
    if not text.strip():
        return 0
    expression = _Expression(text, variables)
    value = expression.comma()
    if expression.tokens:
        raise ArithmeticSyntaxError
    return value
