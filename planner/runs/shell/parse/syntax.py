"""The syntax tree of a shell script: parts of words, and commands."""

from __future__ import annotations

from typing import Literal

from attrs import define, frozen

from megaloom.planner.runs.shell.parse.text import Text
from megaloom.planner.runs.words import Origin


@frozen
class LiteralPart:
    """Characters that stand for themselves."""

    text: Text
    quoted: bool


@frozen
class ParameterPart:
    """An expansion of a variable or an argument: `$X`, `${X:-d}`, `${A[@]}`, `${#X}`, `${!X}`."""

    name: str
    origin: Origin
    quoted: bool
    index: Parts | None = None  # the text between brackets; `@` and `*` are literal
    prefix: Literal["", "#", "!"] = ""
    operator: str = ""
    arguments: tuple[Parts, ...] = ()


@frozen
class SubstitutionPart:
    """The output of commands: `$(…)`; or a file that holds it: `<(…)`."""

    body: Sequence
    origin: Origin
    quoted: bool
    as_file: bool = False


@frozen
class ArithmeticPart:
    """The value of an integer expression: `$((…))`."""

    expression: Parts
    origin: Origin
    quoted: bool


Part = LiteralPart | ParameterPart | SubstitutionPart | ArithmeticPart
Parts = tuple[Part, ...]


@frozen
class Assignment:
    """`X=…`, `X+=…`, `X[i]=…` or `X=(…)`, of which the items have an index or none."""

    name: str
    origin: Origin
    value: Parts | tuple[tuple[Parts | None, Parts], ...]
    index: Parts | None = None
    append: bool = False
    array: bool = False


@define
class Redirection:
    """A redirection; the parser adds the text of a here-document when its line has ended."""

    operator: str
    descriptor: str
    target: Parts
    document: Parts | None = None


@frozen
class Simple:
    """Assignments before a command, and its words. Arguments of `declare` and `export` may be assignments too."""

    assignments: tuple[Assignment, ...]
    words: tuple[Parts | Assignment, ...]
    redirections: tuple[Redirection, ...]
    origin: Origin


@frozen
class Pipeline:
    """Commands joined by `|`."""

    commands: tuple[Node, ...]
    negated: bool


@frozen
class AndOr:
    """Commands joined by `&&` and `||`, from left to right."""

    first: Node
    rest: tuple[tuple[str, Node], ...]


@frozen
class Sequence:
    """Commands one after the other."""

    commands: tuple[Node, ...]


@frozen
class IfClause:
    """Conditions with the commands that follow each, and those of `else`."""

    branches: tuple[tuple[Sequence, Sequence], ...]
    otherwise: Sequence
    origin: Origin


@frozen
class Loop:
    """`while` and `until`."""

    condition: Sequence
    body: Sequence
    until: bool
    origin: Origin


@frozen
class ForEach:
    """`for NAME in WORDS`; without words, the positional arguments."""

    name: str
    words: tuple[Parts, ...] | None
    body: Sequence
    origin: Origin


@frozen
class ForCount:
    """`for ((first; condition; step))`."""

    first: Parts
    condition: Parts
    step: Parts
    body: Sequence
    origin: Origin


@frozen
class CaseClause:
    """`case WORD in`: patterns, commands, and what ends them: `;;`, `;&` or `;;&`."""

    word: Parts
    branches: tuple[tuple[tuple[Parts, ...], Sequence, str], ...]
    origin: Origin


@frozen
class FunctionDefinition:
    """A function; its body runs when it is called."""

    name: str
    body: Node


@frozen
class Group:
    """`{ …; }`, or `(…)` whose changes of variables end with it."""

    body: Sequence
    subshell: bool


@frozen
class ArithmeticClause:
    """`((…))`."""

    expression: Parts
    origin: Origin


@frozen
class DoubleBracket:
    """`[[ … ]]`: words, and operators as strings."""

    tokens: tuple[Parts | str, ...]
    origin: Origin


@frozen
class Redirected:
    """A compound command with redirections."""

    body: Node
    redirections: tuple[Redirection, ...]


Node = (
    Simple
    | Pipeline
    | AndOr
    | Sequence
    | IfClause
    | Loop
    | ForEach
    | ForCount
    | CaseClause
    | FunctionDefinition
    | Group
    | ArithmeticClause
    | DoubleBracket
    | Redirected
)
