"""The results that an evaluation gathers: commands with their environment, and what is unknown or was assumed."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, evolve, field

from megaloom.planner.runs.shell.expand.state import Associative, Indexed, State
from megaloom.planner.runs.shell.parse.text import Text, as_word, known_text, unknowns
from megaloom.planner.runs.words import Command, Origin, Unknown, Word


@define
class Record:
    """Commands in the order of a run, the conditions that are not known at this moment, unknowns and assumptions."""

    commands: list[Command] = field(factory=list)
    unknown: dict[Unknown, None] = field(factory=dict)
    assumed: dict[Unknown, None] = field(factory=dict)
    conditions: list[Unknown] = field(factory=list)
    prefix: list[Word] = field(factory=list)  # of a wrapper that starts the commands
    left: Origin | None = None  # the last `exit`

    def add(self, words: Sequence[Text], state: State, origin: Origin, missing: Sequence[Unknown] = ()) -> None:
        """Add a command that a shell would start now."""
        shown = [as_word(w, origin) for w in words]
        lacking = [u for w in [*self.prefix, *shown] for u in w.unknown]
        unknown = dict.fromkeys([*lacking, *missing, *self.conditions])
        environment = {**_environment(state, origin), **_given_to_env(words, origin)}
        self.commands.append(Command((*self.prefix, *shown), environment, tuple(unknown)))

    def assume(self, unknown: Unknown) -> None:
        """Note that a variable or an argument was taken as not given."""
        self.assumed.setdefault(unknown)

    def condition(self, unknown: Unknown, origin: Origin) -> Unknown:
        """Return the condition that depends on an unknown."""
        return unknown if unknown.kind == "condition" else evolve(unknown, kind="condition", origin=origin)


def _environment(state: State, origin: Origin) -> dict[str, Word]:
    return {
        name: as_word(variable.value, origin)
        for name, variable in state.variables.items()
        if variable.exported and variable.value is not None and not isinstance(variable.value, Indexed | Associative)
    }


def _given_to_env(words: Sequence[Text], origin: Origin) -> dict[str, Word]:
    """Return the variables that `env NAME=VALUE …` sets."""
    result: dict[str, Word] = {}
    texts = [known_text(w) or "" for w in words]
    if "env" not in texts:
        return result
    for word in words[texts.index("env") + 1 :]:
        shown = as_word(word, origin)
        name, equals, value = shown.text.partition("=")
        if not equals or not name.isidentifier():
            break
        result[name] = Word(value, shown.origin, unknowns(word))
    return result
