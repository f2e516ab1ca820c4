"""Evaluator of commands: lists, pipelines, conditions, loops and functions, without running anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.shell.assigned import assigned_names
from megaloom.planner.runs.shell.branches import BranchEvaluator, Flow
from megaloom.planner.runs.shell.expand.arithmetic import ArithmeticUnknownError
from megaloom.planner.runs.shell.expand.patterns import matches
from megaloom.planner.runs.shell.expand.state import State, Status, Variable, merged_states
from megaloom.planner.runs.shell.parse.syntax import (
    AndOr,
    ArithmeticClause,
    CaseClause,
    DoubleBracket,
    ForCount,
    ForEach,
    FunctionDefinition,
    Group,
    IfClause,
    Loop,
    Node,
    Parts,
    Pipeline,
    Redirected,
    Sequence,
    Simple,
)
from megaloom.planner.runs.shell.parse.text import Text, cause, known_text, missing, quoted, shown
from megaloom.planner.runs.words import Origin, Unknown

MOST_COMMANDS = 100_000
MOST_ROUNDS = 2_000


class Evaluator(BranchEvaluator):
    """Evaluates syntax trees in a state. Simple commands are evaluated by the class that is derived from this one."""

    def execute(self, node: Node, state: State) -> Flow:
        """Evaluate a command: change the state as it would, and return how it ends."""
        self.count += 1
        if self.count > MOST_COMMANDS:
            raise UserError(f"{state.path}: the script has loops that are too long to be evaluated")
        handlers: dict[type, Callable[..., Flow]] = {
            Simple: self.simple,
            Sequence: self._sequence,
            AndOr: self._and_or,
            Pipeline: self._pipeline,
            IfClause: self._if,
            CaseClause: self._case,
            ForEach: self._for_each,
            ForCount: self._for_count,
            Loop: self._loop,
            Group: self._group,
            Redirected: self.redirected,
            FunctionDefinition: self._define,
            ArithmeticClause: self._arithmetic,
            DoubleBracket: self.double_bracket,
        }
        return handlers[type(node)](node, state)

    def simple(self, node: Simple, state: State) -> Flow:
        """Evaluate a simple command."""
        raise NotImplementedError

    def redirected(self, node: Redirected, state: State) -> Flow:
        """Evaluate a compound command with redirections."""
        raise NotImplementedError

    def double_bracket(self, node: DoubleBracket, state: State) -> Flow:
        """Evaluate `[[ … ]]`."""
        raise NotImplementedError

    def _sequence(self, node: Sequence, state: State) -> Flow:
        for command in node.commands:
            if not self.capturing:
                state.output = ()
            if flow := self.execute(command, state):
                return flow
        return ""

    def _and_or(self, node: AndOr, state: State) -> Flow:
        flow = self.execute(node.first, state)
        for operator, command in node.rest:
            if flow:
                return flow
            flow = self._joined(operator, command, state)
        return flow

    def _joined(self, operator: str, command: Node, state: State) -> Flow:
        is_and = operator == "&&"

        def skip(inner: State) -> Flow:
            if inner.status.code is None:
                inner.status = Status(int(is_and))
            return ""

        if (state.status.code == 0) != is_and:
            self.skip(command, state)
        go = partial(self.execute, command)
        origin = Origin(state.path, 1) if not isinstance(command, Simple) else command.origin
        return self.choose(state, go, skip, origin) if is_and else self.choose(state, skip, go, origin)

    def _pipeline(self, node: Pipeline, state: State) -> Flow:
        if len(node.commands) == 1:
            flow = self.execute(node.commands[0], state)
            state.status = state.status.negated()
            return flow
        stdin, output = state.stdin, state.output
        self.capturing += 1
        for command in node.commands:
            inner = state.copy()
            inner.stdin, inner.output = stdin, ()
            self.isolated(command, inner)
            stdin = inner.output
            state.files, state.status = inner.files, inner.status
        self.capturing -= 1
        state.output = output + (stdin or ())
        state.status = state.status.negated() if node.negated else state.status
        return ""

    def _if(self, node: IfClause, state: State) -> Flow:
        if not node.branches:
            state.status = Status()
            return self.execute(node.otherwise, state)
        (condition, body), *rest = node.branches
        if flow := self.execute(condition, state):
            return flow
        remaining = evolve(node, branches=tuple(rest))
        self.skip(remaining if state.status.code == 0 else body, state)
        return self.choose(state, partial(self.execute, body), partial(self.execute, remaining), node.origin)

    def _case(self, node: CaseClause, state: State) -> Flow:
        word = self.expander.text(node.word, state)
        patterns = [[self.expander.text(p, state) for p in branch[0]] for branch in node.branches]
        state.status = Status()
        text = known_text(word)
        unknown = cause(word) or next((u for row in patterns for p in row if (u := cause(p))), None)
        if text is None or unknown:
            options = [partial(self._case_from, node, n) for n in range(len(node.branches))]
            complete = any(shown(p) == "*" for row in patterns for p in row)
            skip = [] if complete else [lambda _: ""]
            return self.branch(state, [*options, *skip], unknown or Unknown("?", "command", node.origin), node.origin)
        self.skip(node, state)
        for number, row in enumerate(patterns):
            if any(matches(text, p) for p in row):
                return self._case_from(node, number, state)
        return ""

    def _case_from(self, node: CaseClause, number: int, state: State) -> Flow:
        for _, body, ending in node.branches[number:]:
            flow = self.execute(body, state)
            if flow or ending == ";;":
                return flow
        return ""

    def _for_each(self, node: ForEach, state: State) -> Flow:
        if node.words is None:
            items: list[Text] = list(state.positional)
        else:
            items = [word for parts in node.words for word in self.expander.words(parts, state)]
        state.status = Status()
        if any(p.unknown and not p.quoted for item in items for p in item):
            unknown = next(u for u in map(cause, items) if u)
            self.forget(state, node.body, unknown)
            items = [missing(unknown)]
        rounds = (partial(self._set_item, node.name, quoted(i, False)) for i in items)
        return self._rounds(rounds, node.body, state)

    @staticmethod
    def _set_item(name: str, item: Text, state: State) -> bool:
        state.assign(name, item)
        return True

    def _rounds(self, conditions: Iterable[Callable[[State], bool]], body: Sequence, state: State) -> Flow:
        self.pending.append({})
        leaving: list[tuple[State, Unknown]] = []
        flow = ""
        for condition in conditions:
            if not condition(state):
                break
            flow = self.execute(body, state)
            for other, unknown in self.pending[-1].pop("continue", []):
                state.become(merged_states(state, other, unknown))
            leaving += self.pending[-1].pop("break", [])
            if flow not in ("", "continue"):
                break
        inner = self.pending.pop()
        for name, states in inner.items():
            self.pending[-1].setdefault(name, []).extend(states)
        for other, unknown in leaving:
            state.become(merged_states(state, other, unknown))
        return flow if flow in ("exit", "return") else ""

    def _for_count(self, node: ForCount, state: State) -> Flow:
        self._value(node.first, state, node.origin)
        first = True

        def condition(inner: State) -> bool:
            nonlocal first
            if not first:
                self._value(node.step, inner, node.origin)
            first = False
            return bool(self._value(node.condition, inner, node.origin)) if node.condition else True

        try:
            return self._rounds((condition for _ in range(MOST_ROUNDS)), node.body, state)
        except ArithmeticUnknownError as error:
            return self._unknown_rounds(node.body, state, error.unknown)

    def _loop(self, node: Loop, state: State) -> Flow:
        seen: list[dict[str, Variable]] = []

        def condition(inner: State) -> bool:
            self.execute(node.condition, inner)
            if inner.status.code is None:
                raise ArithmeticUnknownError(inner.status.unknown or Unknown("?", "command", node.origin))
            if inner.status.assumed:
                self.record.assume(inner.status.assumed)
            if seen and seen[-1] == inner.variables and not inner.stdin:
                return False  # another round would be the same
            seen[:] = [dict(inner.variables)]
            return (inner.status.code == 0) != node.until

        try:
            flow = self._rounds((condition for _ in range(MOST_ROUNDS)), node.body, state)
        except ArithmeticUnknownError as error:
            return self._unknown_rounds(node.body, state, error.unknown)
        state.status = Status()
        return flow

    def _unknown_rounds(self, body: Sequence, state: State, unknown: Unknown) -> Flow:
        """Evaluate the body of a loop once whose number of rounds is not known."""
        self.forget(state, body, unknown)
        self._rounds([lambda _: True], body, state)
        self.forget(state, body, unknown)
        state.status = Status()
        return ""

    def forget(self, state: State, body: Sequence, unknown: Unknown) -> None:
        """Make every variable unknown that the commands may set."""
        for name in assigned_names(body):
            state.assign(name, missing(unknown))

    def _group(self, node: Group, state: State) -> Flow:
        if not node.subshell:
            return self.execute(node.body, state)
        inner = state.copy()
        self.isolated(node.body, inner)
        state.output, state.files, state.status = inner.output, inner.files, inner.status
        return ""

    @staticmethod
    def _define(node: FunctionDefinition, state: State) -> Flow:
        state.functions[node.name] = node.body
        state.status = Status()
        return ""

    def _value(self, expression: Parts, state: State, origin: Origin) -> int:
        return self.expander.integer(self.expander.text(expression, state), state, origin)

    def _arithmetic(self, node: ArithmeticClause, state: State) -> Flow:
        try:
            state.status = Status(int(not self._value(node.expression, state, node.origin)))
        except ArithmeticUnknownError as error:
            for name in assigned_names(node):
                state.assign(name, missing(error.unknown))
            state.status = Status(None, error.unknown)
        return ""
