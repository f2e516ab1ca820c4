"""The state of a script: variables, functions, arguments, working folder; and the union of two states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import define, evolve, field, frozen

from megaloom.planner.runs.shell.parse.syntax import Node
from megaloom.planner.runs.shell.parse.text import (
    Text,
    common_ends,
    literal,
    merged,
    missing,
    open_choice,
    quoted,
    same,
    split_words,
)
from megaloom.planner.runs.words import Origin, Unknown


@frozen
class Indexed:
    """The items of an array by their number."""

    items: Mapping[int, Text] = field(factory=dict, hash=False)


@frozen
class Associative:
    """The items of an array by their key."""

    items: Mapping[str, Text] = field(factory=dict, hash=False)


@frozen
class Variable:
    """A variable: its value, or None once it is unset, and its attributes."""

    value: Text | Indexed | Associative | None = None
    exported: bool = False
    integer: bool = False
    reference: str = ""  # the variable that `declare -n` names


@frozen
class Status:
    """The exit status of a command, or what it depends on.

    `assumed` is the variable that was taken as not given; while it is, the status holds.
    """

    code: int | None = 0
    unknown: Unknown | None = None
    assumed: Unknown | None = None

    def negated(self) -> Status:
        """Return the status of `! COMMAND`."""
        return self if self.code is None else evolve(self, code=int(not self.code))


@define
class State:
    """All that the next command of a script depends on. The evaluator changes it, or copies it for each branch."""

    variables: dict[str, Variable]
    positional: tuple[Text, ...]
    given: bool  # the positional arguments are those below; otherwise nobody gave any
    script: Text  # `$0`
    path: str  # the file that is evaluated
    folder: Text
    functions: dict[str, Node] = field(factory=dict)
    files: dict[str, Text] = field(factory=dict)
    status: Status = Status()
    output: Text = ()
    stdin: Text | None = None
    skipped: frozenset[str] = frozenset()  # variables that commands would have set which do not run

    def copy(self) -> State:
        """Return a state that can change without this one."""
        return evolve(self, variables=dict(self.variables), functions=dict(self.functions), files=dict(self.files))

    def become(self, other: State) -> None:
        """Take over everything of another state."""
        for attribute in State.__attrs_attrs__:
            setattr(self, attribute.name, getattr(other, attribute.name))

    def resolved(self, name: str) -> str:
        """Return the name of the variable that a name reference stands for."""
        for _ in range(10):
            variable = self.variables.get(name)
            if not variable or not variable.reference:
                break
            name = variable.reference
        return name

    def assign(self, name: str, value: Text | Indexed | Associative | None) -> None:
        """Set a variable; it stays exported if it is."""
        name = self.resolved(name)
        self.variables[name] = evolve(self.variables.get(name, Variable()), value=value)


def items_of(value: Text | Indexed | Associative | None) -> list[Text]:
    """Return the items of an array in their order; a single value is an array of one."""
    if value is None:
        return []
    if isinstance(value, Indexed):
        return [value.items[i] for i in sorted(value.items)]
    if isinstance(value, Associative):
        return list(value.items.values())
    return [value]


def indexed(items: Sequence[Text]) -> Indexed:
    """Return an array of these items, numbered from 0."""
    return Indexed(dict(enumerate(items)))


def merged_items(left: Sequence[Text], right: Sequence[Text], unknown: Unknown) -> list[Text]:
    """Return the items that two outcomes share at both ends, and one unknown item for those between."""
    marks = _marks([*left, *right])
    before, after = common_ends(marks[: len(left)], marks[len(left) :])
    middles = left[before : len(left) - after], right[before : len(right) - after]
    if not middles[0] and not middles[1]:
        return list(left)
    return [*left[:before], open_choice(middles, unknown), *left[len(left) - after :]]


def _marks(items: Sequence[Text]) -> list[int]:
    """Return a number for each item, equal for items that are the same text."""
    seen: list[Text] = []
    result = []
    for item in items:
        mark = next((n for n, other in enumerate(seen) if same(item, other)), len(seen))
        if mark == len(seen):
            seen.append(item)
        result.append(mark)
    return result


def _merged_variable(left: Variable | None, right: Variable | None, unknown: Unknown) -> Variable:
    if left == right and left is not None:
        return left
    one, two = left or Variable(), right or Variable()
    base = one if left else two
    if isinstance(one.value, Associative) or isinstance(two.value, Associative):
        first = one.value.items if isinstance(one.value, Associative) else {}
        second = two.value.items if isinstance(two.value, Associative) else {}
        keys = dict.fromkeys([*first, *second])
        return evolve(base, value=Associative({k: merged(first.get(k, ()), second.get(k, ()), unknown) for k in keys}))
    if isinstance(one.value, Indexed) or isinstance(two.value, Indexed):
        return evolve(base, value=indexed(merged_items(items_of(one.value), items_of(two.value), unknown)))
    exported = one.exported or two.exported
    if left is None or right is None:  # unset on one side is not the same as empty
        text = left.value if left else two.value
        assert not isinstance(text, Indexed | Associative)
        gap = open_choice([split_words(quoted(text or (), False)), []], unknown)
        return evolve(base, value=gap, exported=exported)
    return evolve(base, value=merged(one.value or (), two.value or (), unknown), exported=exported)


def merged_status(left: Status, right: Status, unknown: Unknown) -> Status:
    """Return the status if both agree, and otherwise what it depends on."""
    if left.code is not None and left.code == right.code:
        return left
    return Status(None, left.unknown or right.unknown or unknown)


def merged_states(left: State, right: State, unknown: Unknown) -> State:
    """Return the state after a condition that is not known: what differs between its outcomes is unknown."""
    names = dict.fromkeys([*left.variables, *right.variables])
    paths = dict.fromkeys([*left.files, *right.files])
    alike = len(left.positional) == len(right.positional) and all(map(same, left.positional, right.positional))
    return State(
        {n: _merged_variable(left.variables.get(n), right.variables.get(n), unknown) for n in names},
        left.positional if alike else tuple(merged_items(left.positional, right.positional, unknown)),
        left.given or right.given,
        left.script,
        left.path,
        left.folder if same(left.folder, right.folder) else missing(unknown),
        {**right.functions, **left.functions},
        {p: merged(left.files.get(p, ()), right.files.get(p, ()), unknown) for p in paths},
        merged_status(left.status, right.status, unknown),
        merged(left.output, right.output, unknown),
        left.stdin,
        left.skipped | right.skipped,
    )


def named_value(text: str, origin: Origin) -> Variable:
    """Return an exported variable with a known value."""
    return Variable(literal(text, origin), exported=True)
