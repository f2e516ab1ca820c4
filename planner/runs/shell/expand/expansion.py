"""Expansion of words: variables, arithmetic, output of commands, splitting at white space, braces."""

from __future__ import annotations

import re
from collections.abc import Callable

from megaloom.planner.runs.shell.expand.arithmetic import (
    ArithmeticSyntaxError,
    ArithmeticUnknownError,
    Variables,
    evaluate_arithmetic,
)
from megaloom.planner.runs.shell.expand.braces import braced
from megaloom.planner.runs.shell.expand.fields import (
    as_item,
    split_expansion,
    with_home,
    without_glob,
    without_last_newlines,
)
from megaloom.planner.runs.shell.expand.parameters import (
    has_gap,
    in_case,
    is_list,
    keys_of,
    list_items,
    one_text,
    replaced,
    scalar,
    substring,
    trimmed,
)
from megaloom.planner.runs.shell.expand.state import Associative, Indexed, State
from megaloom.planner.runs.shell.parse.source import ShellSyntaxError
from megaloom.planner.runs.shell.parse.syntax import (
    ArithmeticPart,
    LiteralPart,
    ParameterPart,
    Part,
    Parts,
    Sequence,
)
from megaloom.planner.runs.shell.parse.text import (
    Piece,
    Text,
    assumption,
    cause,
    known_text,
    literal,
    missing,
    quoted,
    shown,
    size,
)
from megaloom.planner.runs.words import Origin, Unknown

Run = Callable[[Sequence, State], Text]
"""Evaluates commands in a copy of the state, and returns what they print."""


class Expander:
    """Expands words in a state. `run` evaluates `$(…)`; `assume` is told which variables are taken as not given."""

    def __init__(self, run: Run, assume: Callable[[Unknown], None]) -> None:
        self.run = run
        self.absent: set[str] = set()  # variables that were taken as not given
        self.lacks_files = False  # a file that the script reads is not there, so any variable may have been set
        self._assume = assume

    def assume(self, unknown: Unknown) -> None:
        """Note that a variable or argument is taken as not given."""
        self.absent.add(unknown.name)
        self._assume(unknown)

    def text(self, parts: Parts, state: State) -> Text:
        """Return a word as one text: no splitting, as on the right of an assignment. Quoted pieces are marked."""
        result: Text = ()
        for part in with_home(parts):
            value = self.value(part, state)
            result += one_text(value, part.quoted) if isinstance(value, list) else value
        return result

    def words(self, parts: Parts, state: State, globs: bool = True) -> list[Text]:
        """Return the words that a word expands to. `globs`: a pattern stands for names of files."""
        words: list[Text] = []
        for alternative in braced(with_home(parts)):
            words += self._fields(alternative, state)
        return [without_glob(w) if globs else w for w in words]

    def _fields(self, parts: Parts, state: State) -> list[Text]:
        fields: list[Text] = []
        current: Text | None = None
        separators = self.separators(state)
        for part in parts:
            value = self.value(part, state)
            if isinstance(part, LiteralPart) or (part.quoted and not isinstance(value, list)):
                assert not isinstance(value, list)
                if part.quoted or value:
                    current = (current or ()) + value
                continue
            pieces: list[Text | None] = []  # None: a boundary between two words
            for number, item in enumerate(value if isinstance(value, list) else [value]):
                pieces += [None] * (number > 0) + ([item] if part.quoted else split_expansion(item, separators))
            for piece in pieces:
                if piece is None:
                    if current is not None:
                        fields.append(current)
                    current = None
                elif part.quoted or piece:
                    current = (current or ()) + piece
        return fields if current is None else [*fields, current]

    def separators(self, state: State) -> str:
        """Return the characters of IFS."""
        variable = state.variables.get("IFS")
        if variable is None or variable.value is None or isinstance(variable.value, Indexed | Associative):
            return " \t\n"
        text = known_text(variable.value)
        return " \t\n" if text is None else text

    def value(self, part: Part, state: State) -> Text | list[Text]:
        """Return the value of one part of a word: a list for `$@` and `${A[@]}`."""
        if isinstance(part, LiteralPart):
            return quoted(part.text, part.quoted)
        if isinstance(part, ArithmeticPart):
            return quoted(self.arithmetic(part.expression, state, part.origin), part.quoted)
        if isinstance(part, ParameterPart):
            value = self._parameter(part, state)
            if isinstance(value, list):
                return [as_item(v, part.quoted) for v in value]
            return quoted(value) if part.quoted else value
        if part.as_file:
            return missing(Unknown("<(…)", "command", part.origin))
        output = self.run(part.body, state)
        return quoted(without_last_newlines(output), part.quoted)

    def arithmetic(self, expression: Parts, state: State, origin: Origin) -> Text:
        """Return the value of an integer expression as a text."""
        try:
            return literal(str(self.integer(self.text(expression, state), state, origin)), origin)
        except ArithmeticUnknownError as error:
            return missing(error.unknown)

    def integer(self, text: Text, state: State, origin: Origin) -> int:
        """Return the value of an integer expression. Raises ArithmeticUnknownError if it is not known."""
        if unknown := cause(text):
            raise ArithmeticUnknownError(unknown)

        def read(name: str, index: int | None) -> int:
            at = None if index is None else literal(str(index), origin)
            value = scalar(state, name, at, origin)
            if value is None and name in self.absent:
                return 0
            if value is None:
                raise ArithmeticUnknownError(Unknown(name, "variable", origin))
            return self.integer(value, state, origin)

        def write(name: str, index: int | None, number: int) -> None:
            self.assign(state, name, literal(str(number), origin), None if index is None else str(index))

        try:
            return evaluate_arithmetic(shown(text), Variables(read, write))
        except (ArithmeticSyntaxError, RecursionError):
            raise ShellSyntaxError(origin) from None

    def assign(self, state: State, name: str, value: Text, index: str | None = None) -> None:
        """Set a variable, or an item of an array."""
        if index is None:
            state.assign(name, value)
            return
        variable = state.variables.get(state.resolved(name))
        before = variable.value if variable else None
        if isinstance(before, Associative):
            state.assign(name, Associative({**before.items, index: value}))
            return
        items = before.items if isinstance(before, Indexed) else {0: before} if before else {}
        number = int(index)
        state.assign(name, Indexed({**items, (number if number >= 0 else number + max(items, default=-1) + 1): value}))

    def index(self, parts: Parts, state: State, name: str, origin: Origin) -> Text:
        """Return the index of an array's item: a key as it is, a number evaluated, `@` and `*` as they are."""
        text = self.text(parts, state)
        variable = state.variables.get(state.resolved(name))
        if shown(text) in ("@", "*") or (variable and isinstance(variable.value, Associative)):
            return text
        try:
            return literal(str(self.integer(text, state, origin)), origin)
        except ArithmeticUnknownError as error:
            return missing(error.unknown)

    def _parameter(self, part: ParameterPart, state: State) -> Text | list[Text]:
        name = part.name
        index = self.index(part.index, state, name, part.origin) if part.index is not None else None
        if part.prefix == "!" and not (index and is_list(name, index)):
            target = scalar(state, name, index, part.origin) or ()
            pointed = re.fullmatch(r"(\w+)(?:\[([@*\d]+)\])?", known_text(target) or "")
            if not pointed:
                return missing(cause(target) or Unknown(name, "variable", part.origin))
            name, index = pointed[1], literal(pointed[2], part.origin) if pointed[2] else None
        if is_list(name, index):
            return self._list(part, state, name)
        value = scalar(state, name, index, part.origin)
        if part.prefix == "#":
            text = self._present(value, name, part.origin)
            return missing(unknown) if (unknown := cause(text)) else literal(str(size(text)), part.origin)
        return self._operated(part, state, name, value)

    def _present(self, value: Text | None, name: str, origin: Origin) -> Text:
        return missing(_not_given(name, origin), unset=True) if value is None else value

    def _list(self, part: ParameterPart, state: State, name: str) -> Text | list[Text]:
        items = list_items(state, name)
        if not items and self.lacks_files and name not in ("@", "*") and state.resolved(name) not in state.variables:
            items = [missing(Unknown(name, "variable", part.origin))]
        if part.prefix == "#":
            unknown = next((u for u in map(cause, items) if u), None)
            if has_gap(items) and unknown:
                return missing(unknown)
            return literal(str(len(items)), part.origin)
        if part.prefix == "!":
            items = keys_of(state, name, part.origin)
        elif part.operator == ":":
            items = [state.script, *items] if name in ("@", "*") else items
            start, length = self._range(part, state)
            if start is None or has_gap(items):
                return missing(next((u for u in map(cause, items) if u), Unknown(name, "variable", part.origin)))
            start = start + len(items) if start < 0 else start
            items = items[start : None if length is None else start + length]
        elif part.operator.lstrip(":") in ("-", "+", "=", "?") and part.operator:
            if (not items) == (part.operator[-1] in "-="):
                return self.text(part.arguments[0], state)
            items = [] if part.operator[-1] == "+" else items
        elif part.operator:
            items = [self._changed(part, state, item) for item in items]
        star = name == "*" or (part.index is not None and self._is_star(part.index))
        return one_text(items, True, self.separators(state)[:1]) if star and part.quoted else items

    @staticmethod
    def _is_star(parts: Parts) -> bool:
        return all(isinstance(p, LiteralPart) and shown(p.text) == "*" for p in parts)

    def _range(self, part: ParameterPart, state: State) -> tuple[int | None, int | None]:
        try:
            numbers = [self.integer(self.text(a, state), state, part.origin) for a in part.arguments]
        except ArithmeticUnknownError:
            return None, None
        return numbers[0], numbers[1] if len(numbers) > 1 else None

    def _operated(self, part: ParameterPart, state: State, name: str, value: Text | None) -> Text:
        operator = part.operator
        if operator.lstrip(":") not in ("-", "=", "?", "+") or operator in ("", ":"):
            text = self._present(value, name, part.origin)
            return self._changed(part, state, text) if operator else text
        if value is not None and cause(value) and not shown(value):
            return value if operator[-1] != "+" else missing(cause(value) or Unknown(name, "variable", part.origin))
        is_set = bool(value and size(value)) if operator[0] == ":" else value is not None
        variable = state.variables.get(state.resolved(name))
        if variable and variable.value is None and operator[0] != ":":
            is_set = False
        if value is None and operator[-1] != "?":
            self.assume(_not_given(name, part.origin))
        if operator[-1] == "+":
            return self.text(part.arguments[0], state) if is_set else ()
        if is_set:
            return value or ()
        if operator[-1] == "?":
            return missing(_not_given(name, part.origin))
        default = self.text(part.arguments[0], state)
        if not size(default) and (value is None or assumption(value)):
            default = value or (Piece("", part.origin, assumed=_not_given(name, part.origin)),)
        if operator[-1] == "=":
            state.assign(name, default)
        return default

    def _changed(self, part: ParameterPart, state: State, text: Text) -> Text:
        operator = part.operator
        if operator == ":":
            start, length = self._range(part, state)
            return (
                missing(cause(text) or Unknown(part.name, "variable", part.origin))
                if start is None
                else substring(text, start, length)
            )
        if operator[0] in "^,":
            return in_case(text, operator)
        if operator == "@":
            return (
                text
                if known_text(text) is not None and re.fullmatch(r"[\w./-]+", shown(text))
                else missing(cause(text) or Unknown(part.name, "command", part.origin))
            )
        argument = self.text(part.arguments[0], state)
        if operator[0] in "#%":
            return trimmed(text, operator, argument)
        replacement = self.text(part.arguments[1], state) if len(part.arguments) > 1 else ()
        return replaced(text, operator, argument, replacement)


def _not_given(name: str, origin: Origin) -> Unknown:
    return Unknown(name, "positional" if name.isdecimal() else "variable", origin)
