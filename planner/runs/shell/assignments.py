"""Evaluator of assignments, declarations and calls of functions."""

from __future__ import annotations

from collections.abc import Sequence

from megaloom.planner.runs.shell.branches import Flow
from megaloom.planner.runs.shell.builtins import declared
from megaloom.planner.runs.shell.evaluator import Evaluator
from megaloom.planner.runs.shell.expand.arithmetic import ArithmeticUnknownError
from megaloom.planner.runs.shell.expand.state import (
    Associative,
    Indexed,
    State,
    Status,
    Variable,
    indexed,
    items_of,
    merged_states,
)
from megaloom.planner.runs.shell.parse.source import ShellSyntaxError
from megaloom.planner.runs.shell.parse.syntax import Assignment, ParameterPart, Parts, Simple
from megaloom.planner.runs.shell.parse.text import Text, cause, joined, known_text, literal, missing, quoted
from megaloom.planner.runs.words import Origin, Unknown

CommandWords = Sequence[Text]
DEEPEST_CALL = 60


class AssignmentEvaluator(Evaluator):
    """Evaluates assignments and declarations, and the bodies of functions with their local variables."""

    def __init__(self) -> None:
        super().__init__()
        self.locals: list[dict[str, Variable | None]] = []

    def call(self, name: str, arguments: CommandWords, state: State, origin: Origin) -> Flow:
        """Evaluate a call of a function."""
        if len(self.locals) > DEEPEST_CALL:
            raise ShellSyntaxError(origin)
        outer = state.positional, state.given
        state.positional, state.given = tuple(arguments), True
        self.locals.append({})
        self.pending.append({})
        flow = self.execute(state.functions[name], state)
        pending = self.pending.pop()
        for other, unknown in pending.pop("return", []):
            state.become(merged_states(state, other, unknown))
        for kind, states in pending.items():
            self.pending[-1].setdefault(kind, []).extend(states)
        for variable, before in self.locals.pop().items():
            if before is None:
                state.variables.pop(variable, None)
            else:
                state.variables[variable] = before
        state.positional, state.given = outer
        return "" if flow == "return" else flow

    def assign(self, node: Assignment, state: State) -> None:
        """Evaluate an assignment."""
        value = self._new_value(node, state)
        if node.index is not None and not isinstance(value, Indexed | Associative):
            index = self.expander.index(node.index, state, node.name, node.origin)
            key = known_text(index)
            if key is None:
                unknown = cause(index) or Unknown(node.name, "variable", node.origin)
                state.assign(node.name, indexed([missing(unknown)]))
            else:
                self.expander.assign(state, node.name, quoted(value), key)
            return
        state.assign(node.name, value)

    def _new_value(self, node: Assignment, state: State) -> Text | Indexed | Associative:
        variable = state.variables.get(state.resolved(node.name), Variable())
        if node.array:
            return self._array(node, variable, state)
        assert not node.value or not isinstance(node.value[0], tuple)
        text = quoted(self.expander.text(node.value, state), False)  # type: ignore[arg-type]
        if variable.integer:
            text = self._integer(text, state, node.origin)
        before = variable.value
        if node.index is None and isinstance(before, Indexed):  # without an index, the first item is meant
            return Indexed({**before.items, 0: (before.items.get(0, ()) if node.append else ()) + quoted(text)})
        if node.index is None and isinstance(before, Associative):
            return Associative({**before.items, "0": (before.items.get("0", ()) if node.append else ()) + quoted(text)})
        if not node.append:
            return text
        if node.index is not None:
            item = self.expander.value(ParameterPart(node.name, node.origin, False, node.index), state)
            is_new = isinstance(item, list) or item[:1] == () or item[0].unset
            return text if is_new or isinstance(item, list) else item + text
        if state.resolved(node.name) not in state.variables and known_text(text) is not None:
            self.record.assume(Unknown(node.name, "variable", node.origin))
        assert not isinstance(before, Indexed | Associative)
        return (
            (before or ()) + text
            if not variable.integer
            else self._integer(joined([before or (), text], "+"), state, node.origin)
        )

    def _integer(self, text: Text, state: State, origin: Origin) -> Text:
        try:
            return literal(str(self.expander.integer(text, state, origin)), text[0].origin if text else origin)
        except ArithmeticUnknownError as error:
            return missing(error.unknown)

    def _array(self, node: Assignment, variable: Variable, state: State) -> Indexed | Associative:
        items: list[tuple[Parts | None, Parts]] = list(node.value)  # type: ignore[arg-type]
        if isinstance(variable.value, Associative):
            result = dict(variable.value.items) if node.append else {}
            for index, parts in items:
                key = known_text(self.expander.text(index or (), state)) or ""
                result[key] = quoted(self.expander.text(parts, state))
            return Associative(result)
        before = variable.value if node.append else None
        numbered = dict(before.items) if isinstance(before, Indexed) else dict(enumerate(items_of(before)))
        position = max(numbered, default=-1) + 1
        for index, parts in items:
            if index is not None:
                at = self.expander.index(index, state, node.name, node.origin)
                position = int(known_text(at) or position)
                numbered[position] = quoted(self.expander.text(parts, state))
                position += 1
                continue
            for word in self.expander.words(parts, state):
                numbered[position] = word
                position += 1
        return Indexed(numbered)

    def declare(self, command: str, node: Simple, words: CommandWords, state: State) -> None:
        """Evaluate `declare`, `typeset`, `local`, `export` or `readonly`."""
        options = "".join(t for w in words if (t := known_text(w) or "")[:1] in ("-", "+"))
        state.status = Status()
        plain = [t for w in words if (t := known_text(w) or "") and t[:1] not in ("-", "+")]
        for name in plain:  # `export "X=1"`
            head, equals, text = name.partition("=")
            self._local(command, head, options, state)
            declared(state, head, options, literal(text, node.origin) if equals else None, command)
        for item in node.words:
            if isinstance(item, Assignment):
                value = self._declared_value(item, options, state)
                self._local(command, item.name, options, state)
                declared(state, item.name, options, value, command)

    def _declared_value(self, item: Assignment, options: str, state: State) -> Text | Indexed | Associative:
        if "A" in options and not item.append:
            state = state.copy()
            state.assign(item.name, Associative())
        value = self._new_value(item, state)
        if "i" in options and not isinstance(value, Indexed | Associative):
            return self._integer(value, state, item.origin)
        return value

    def _local(self, command: str, name: str, options: str, state: State) -> None:
        is_local = command == "local" or (command in ("declare", "typeset") and "g" not in options)
        if self.locals and is_local and name not in self.locals[-1]:
            self.locals[-1][name] = state.variables.get(name)
            state.variables[name] = Variable()
