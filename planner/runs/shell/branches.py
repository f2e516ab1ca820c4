"""Evaluation of branches: what holds after a condition, known or not, and the output of commands.

Where a condition is not known, all branches are evaluated, and only what differs after them is unknown. A branch that
ends in `exit` is not the one that trains, so it is left out if there is another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megaloom.planner.runs.shell.assigned import assigned_names
from megaloom.planner.runs.shell.expand.expansion import Expander
from megaloom.planner.runs.shell.expand.state import State, merged_states
from megaloom.planner.runs.shell.parse.syntax import Node, Sequence
from megaloom.planner.runs.shell.parse.text import Text
from megaloom.planner.runs.shell.record import Record
from megaloom.planner.runs.words import Origin, Unknown

Flow = str
"""Effect of a command on what follows: "" goes on; "exit", "return", "break" and "continue" leave the script, the
function or the loop around it."""


class BranchEvaluator:
    """Evaluates branches of syntax trees. Commands are evaluated by the classes that are derived from this one."""

    def __init__(self) -> None:
        self.record = Record()
        self.expander = Expander(self.substitute, self.record.assume)
        self.capturing = 0
        self.count = 0
        self.names: dict[int, tuple[Node, frozenset[str]]] = {}  # what a command may set, by its identity
        self.pending: list[dict[Flow, list[tuple[State, Unknown]]]] = [{}]

    def execute(self, node: Node, state: State) -> Flow:
        """Evaluate a command: change the state as it would, and return how it ends."""
        raise NotImplementedError

    def substitute(self, body: Sequence, state: State) -> Text:
        """Return what commands print; their status becomes that of the state."""
        inner = state.copy()
        inner.output = ()
        self.capturing += 1
        try:
            self.isolated(body, inner)
        finally:
            self.capturing -= 1
        state.status = inner.status
        return inner.output

    def isolated(self, body: Node, inner: State) -> None:
        """Evaluate commands in a state of their own, as a subshell does."""
        self.pending.append({})
        self.execute(body, inner)
        for kept in self.pending.pop().values():
            for other, unknown in kept:
                inner.become(merged_states(inner, other, unknown))

    def branch(self, state: State, options: Iterable[Callable[[State], Flow]], unknown: Unknown, at: Origin) -> Flow:
        """Evaluate each option in a copy of the state, and take over what all outcomes agree on."""
        outcomes: list[tuple[State, Flow]] = []
        self.record.conditions.append(self.record.condition(unknown, at))
        for option in options:
            copy = state.copy()
            outcomes.append((copy, option(copy)))
        self.record.conditions.pop()
        staying = [o for o in outcomes if o[1] != "exit"] or outcomes
        flows = {flow for _, flow in staying}
        if len(flows) > 1:
            for other, flow in staying:
                if flow:
                    self.pending[-1].setdefault(flow, []).append((other, unknown))
            staying = [o for o in staying if not o[1]] or staying[:1]
        result = staying[0][0]
        for other, _ in staying[1:]:
            result = merged_states(result, other, unknown)
        state.become(result)
        return staying[0][1]

    def choose(self, state: State, yes: Callable[[State], Flow], no: Callable[[State], Flow], at: Origin) -> Flow:
        """Evaluate one of two options by the status of the state, or both if it is not known."""
        status = state.status
        if status.code is None:
            return self.branch(state, (yes, no), status.unknown or Unknown("?", "command", at), at)
        option, other = (yes, no) if status.code == 0 else (no, yes)
        if not status.assumed:
            return option(state)
        copy, before = state.copy(), len(self.record.commands)
        flow = option(copy)
        if flow == "exit" and len(self.record.commands) == before:
            return other(state)  # a script that ends without an argument is not run without it
        self.record.assume(status.assumed)
        state.become(copy)
        return flow

    def skip(self, node: Node, state: State) -> None:
        """Note the variables of commands that do not run: where they are not set, they are empty, not asked for."""
        if state.status.code is None:
            return
        if id(node) not in self.names:
            self.names[id(node)] = node, frozenset(assigned_names(node))
        state.skipped |= self.names[id(node)][1]
