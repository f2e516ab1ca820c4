"""Evaluator of simple commands: assignments, redirections, builtins, functions, and what other programs are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from posixpath import normpath

from attrs import evolve

from megaloom.planner.runs.shell.assignments import AssignmentEvaluator, CommandWords
from megaloom.planner.runs.shell.branches import Flow
from megaloom.planner.runs.shell.builtins import BUILTINS
from megaloom.planner.runs.shell.expand.arithmetic import ArithmeticUnknownError
from megaloom.planner.runs.shell.expand.conditions import BINARY, BracketCondition, Surroundings
from megaloom.planner.runs.shell.expand.printing import echoed, formatted
from megaloom.planner.runs.shell.expand.pure import FILTERS, PURE_PROGRAMS, READING_FILES, found_by_grep
from megaloom.planner.runs.shell.expand.state import State, Status, indexed
from megaloom.planner.runs.shell.folders import Folders, moved
from megaloom.planner.runs.shell.parse.syntax import (
    Assignment,
    DoubleBracket,
    LiteralPart,
    Parts,
    Redirected,
    Redirection,
    Simple,
    SubstitutionPart,
)
from megaloom.planner.runs.shell.parse.text import Text, cause, displayed, known_text, literal, missing, quoted, shown
from megaloom.planner.runs.words import Origin, Unknown


class CommandEvaluator(AssignmentEvaluator):
    """Evaluates simple commands. The class that is derived from this one handles the programs that a script starts."""

    def __init__(self, folders: Folders) -> None:
        super().__init__()
        self.folders = folders
        self.handlers: dict[str, Callable[[CommandWords, State, Origin], Flow]] = {
            "echo": self._echo,
            "printf": self._printf,
            "cat": self._cat,
            "tee": self._tee,
            "cd": self._cd,
            "pushd": self._cd,
            "pwd": self._pwd,
            "realpath": self._realpath,
            "readlink": self._realpath,
            "test": self._test,
            "[": self._test,
            "let": self._let,
            "exit": self._exit,
            "return": self._leave,
            "break": self._leave,
            "continue": self._leave,
        }

    def external(self, words: CommandWords, state: State, origin: Origin) -> Flow:
        """Evaluate a command that is neither a builtin nor a function."""
        raise NotImplementedError

    def simple(self, node: Simple, state: State) -> Flow:
        """Evaluate a simple command."""
        words: list[Text] = []
        for item in node.words:
            if not isinstance(item, Assignment):
                words += self.expander.words(
                    item, state, globs=not words or known_text(words[0]) not in ("let", "[", "test")
                )
        return self._with_redirections(node.redirections, state, lambda: self._assigned(node, words, state))

    def _assigned(self, node: Simple, words: CommandWords, state: State) -> Flow:
        if not words:
            state.status = Status()
            for assignment in node.assignments:
                self.assign(assignment, state)
            if self.capturing and not node.assignments and [r.operator for r in node.redirections] == ["<"]:
                path = self.expander.text(node.redirections[0].target, state)  # `$(<FILE)` prints a file
                return self._cat((literal("cat", node.origin), path), state, node.origin)
            return ""
        before = {a.name: state.variables.get(a.name) for a in node.assignments}
        for assignment in node.assignments:
            self.assign(assignment, state)
            state.variables[assignment.name] = evolve(state.variables[assignment.name], exported=True)
        flow = self._named(node, words, state)
        for name, variable in before.items():
            if variable is None:
                state.variables.pop(name, None)
            else:
                state.variables[name] = variable
        return flow

    def _named(self, node: Simple, words: CommandWords, state: State) -> Flow:
        name = known_text(words[0])
        if name in ("command", "builtin") and len(words) > 1 and not (known_text(words[1]) or "-").startswith("-"):
            words, name = words[1:], known_text(words[1])
        if name in ("declare", "typeset", "local", "export", "readonly"):
            self.declare(name, node, words[1:], state)
            return ""
        return self.command(words, state, node.origin)

    def command(self, words: CommandWords, state: State, origin: Origin) -> Flow:
        """Evaluate a command by its words."""
        name = known_text(words[0]) or ""
        if name in state.functions:
            return self.call(name, words[1:], state, origin)
        if name in self.handlers:
            return self.handlers[name](words, state, origin)
        if name in BUILTINS:
            state.status = Status()
            BUILTINS[name](state, words[1:], origin)
            return ""
        if name in PURE_PROGRAMS and (output := self._pure(name, words[1:], state, origin)) is not None:
            state.output += output
            state.status = Status()
            return ""
        if name == "grep" and (found := self._searched(words[1:], state)) is not None:
            state.status = Status(int(not found))
            return ""
        return self.external(words, state, origin)

    @staticmethod
    def _searched(words: CommandWords, state: State) -> bool | None:
        """Return whether `grep -q` finds its text in a known input; None if that is not known."""
        if state.stdin is None or any(map(cause, [*words, state.stdin])):
            return None
        return found_by_grep([known_text(word) or "" for word in words], shown(state.stdin))

    def _pure(self, name: str, words: CommandWords, state: State, origin: Origin) -> Text | None:
        texts = [known_text(w) for w in words]
        stdin = state.stdin
        if name in READING_FILES and len(words) > 1 and (content := self.content(texts[-1], state)) is not None:
            texts, words, stdin = texts[:-1], words[:-1], content
        unknown = next((u for u in map(cause, [*words, *([stdin or ()] if name in FILTERS else [])]) if u), None)
        if unknown:
            return missing(unknown)
        if name in FILTERS and stdin is None:
            return None
        texts = [t for n, t in enumerate(texts) if t != "--" or "--" in texts[:n]]
        output = PURE_PROGRAMS[name]([t or "" for t in texts], shown(stdin or ()))
        if output is None:
            return None
        source = [p for text in (words if name not in FILTERS else [stdin or ()]) for p in text if p.text.strip()]
        same_line = source and all(p.origin == source[0].origin for p in source)
        return literal(output, source[0].origin if same_line else origin)

    def content(self, path: str | None, state: State) -> Text | None:
        """Return the text of a file that the script wrote, or of one in the script's folder; None for another one."""
        if not path:
            return None
        if (written := state.files.get(normpath(path))) is not None:
            return written
        file = self.folders.beside(path)
        return literal(file[1], Origin(file[0], 1)) if file else None

    def _with_redirections(self, redirections: Sequence[Redirection], state: State, run: Callable[[], Flow]) -> Flow:
        stdin, output, path = state.stdin, state.output, None
        appends = captures = False
        for node in redirections:
            if node.operator in ("<", "<<", "<<-", "<<<"):
                state.stdin = self._input(node, state)
            elif node.operator != "<&" and node.descriptor in ("", "1"):
                path = self.expander.text(node.target, state)
                captures, appends = shown(path) != "1", node.operator in (">>", "&>>")
        if captures:
            state.output = ()
            self.capturing += 1
        flow = run()
        if captures:
            self.capturing -= 1
            written, state.output = state.output, output
            if path and (name := shown(path)) and not name.startswith("/dev/") and not name.isdecimal():
                name = normpath(name)
                state.files[name] = (state.files.get(name, ()) if appends else ()) + written
        state.stdin = stdin if redirections else state.stdin
        return flow

    def _input(self, node: Redirection, state: State) -> Text | None:
        if node.document is not None:
            return quoted(self.expander.text(node.document, state), False)
        only = node.target[0] if len(node.target) == 1 else None
        if isinstance(only, SubstitutionPart) and only.as_file:
            return self.substitute(only.body, state)
        text = quoted(self.expander.text(node.target, state), False)
        if node.operator == "<<<":
            return text + literal("\n", text[0].origin if text else Origin(state.path, 1))
        return state.files.get(normpath(known_text(text) or ""))

    def redirected(self, node: Redirected, state: State) -> Flow:
        """Evaluate a compound command with redirections."""
        return self._with_redirections(node.redirections, state, lambda: self.execute(node.body, state))

    def double_bracket(self, node: DoubleBracket, state: State) -> Flow:
        """Evaluate `[[ … ]]`."""
        tokens = [_operator(t) or self.expander.text(t, state) if not isinstance(t, str) else t for t in node.tokens]
        state.status = BracketCondition(tokens, True, node.origin, self._surroundings(state, node.origin)).outcome()
        return ""

    def _surroundings(self, state: State, origin: Origin) -> Surroundings:
        def exists(path: str) -> bool | None:
            return True if normpath(path) in state.files or self.folders.has(path, known_text(state.folder)) else None

        def is_set(name: str) -> Status:
            variable = state.variables.get(state.resolved(name))
            if variable is None:
                return Status(1, assumed=Unknown(name, "variable", origin))
            return Status(int(variable.value is None))

        def number(text: Text) -> int | Unknown:
            try:
                return self.expander.integer(text, state, origin)
            except ArithmeticUnknownError as error:
                return error.unknown

        def match(groups: Sequence[str]) -> None:
            state.assign("BASH_REMATCH", indexed([literal(g, origin) for g in groups]))

        return Surroundings(exists, is_set, number, match)

    def _test(self, words: CommandWords, state: State, origin: Origin) -> Flow:
        is_bracket = known_text(words[0]) == "["
        operands = words[1:-1] if is_bracket else words[1:]
        if is_bracket and known_text(words[-1]) != "]":
            state.status = Status(2)
            return ""
        gap = next((p.unknown for w in operands for p in w if p.unknown and not p.quoted and len(w) > 1), None)
        if gap:
            state.status = Status(None, gap)
        else:
            state.status = BracketCondition(operands, False, origin, self._surroundings(state, origin)).outcome()
        return ""

    def _echo(self, words: CommandWords, state: State, origin: Origin) -> Flow:
        state.output += echoed(words[1:], origin)
        state.status = Status()
        return ""

    def _printf(self, words: CommandWords, state: State, origin: Origin) -> Flow:
        state.status = Status()
        if len(words) > 3 and known_text(words[1]) == "-v":
            state.assign(known_text(words[2]) or "_", formatted(words[3:], origin))
        else:
            state.output += formatted(words[1:], origin)
        return ""

    def _cat(self, words: CommandWords, state: State, origin: Origin) -> Flow:
        state.status = Status()
        texts = [self.content(known_text(w), state) for w in words[1:] if known_text(w) != "-"]
        if not texts and state.stdin is not None:
            state.output += state.stdin
        elif texts and all(t is not None for t in texts):
            state.output += tuple(p for t in texts if t for p in t)
        else:
            name = displayed(words[1]) if len(words) > 1 else "cat"
            state.output += missing(Unknown(name, "file", origin))
        return ""

    def _tee(self, words: CommandWords, state: State, origin: Origin) -> Flow:
        stdin = state.stdin or ()
        for word in words[1:]:
            if (name := known_text(word)) and not name.startswith(("-", "/dev/")) and not cause(stdin):
                state.files[normpath(name)] = stdin
        state.output += stdin
        return ""

    def _cd(self, words: CommandWords, state: State, origin: Origin) -> Flow:
        paths = [w for w in words[1:] if not (known_text(w) or "-").startswith("-") or cause(w)]
        state.folder = moved(state.folder, paths[0]) if paths else missing(Unknown("HOME", "variable", origin))
        state.status = Status()
        return ""

    def _pwd(self, words: CommandWords, state: State, origin: Origin) -> Flow:
        state.output += state.folder + literal("\n", origin)
        state.status = Status()
        return ""

    def _realpath(self, words: CommandWords, state: State, origin: Origin) -> Flow:
        paths = [w for w in words[1:] if not (known_text(w) or "").startswith("-")]
        if shown(words[0]) == "readlink" and not any((known_text(w) or "") in ("-f", "-e", "-m") for w in words[1:]):
            return self.external(words, state, origin)
        for path in paths:
            state.output += moved(state.folder, path) + literal("\n", origin)
        state.status = Status()
        return ""

    def _let(self, words: CommandWords, state: State, origin: Origin) -> Flow:
        try:
            values = [self.expander.integer(w, state, origin) for w in words[1:]]
            state.status = Status(int(not (values and values[-1])))
        except ArithmeticUnknownError as error:
            for word in words[1:]:
                state.assign(shown(word).partition("=")[0].strip("+-*/% "), missing(error.unknown))
            state.status = Status(None, error.unknown)
        return ""

    def _exit(self, words: CommandWords, state: State, origin: Origin) -> Flow:
        self._with_code(words, state)
        self.record.left = origin
        return "exit"

    def _leave(self, words: CommandWords, state: State, origin: Origin) -> Flow:
        name = shown(words[0])
        if name == "return":
            self._with_code(words, state)
        return name

    @staticmethod
    def _with_code(words: CommandWords, state: State) -> None:
        if len(words) > 1:
            code = known_text(words[1])
            state.status = Status(int(code) % 256) if code and code.isdecimal() else Status(None, cause(words[1]))


def _operator(parts: Parts) -> str:
    """Return a word of `[[ ]]` if it is an operator or an option."""
    if len(parts) == 1 and isinstance(parts[0], LiteralPart) and not parts[0].quoted:
        text = shown(parts[0].text)
        if text in BINARY or text == "!" or (len(text) == 2 and text[0] == "-" and text[1].isalpha()):
            return text
    return ""
