"""Parser of commands: a recursive descent over the grammar of bash."""

from __future__ import annotations

import re

from megaloom.planner.runs.shell.parse.simple_parser import SimpleParser
from megaloom.planner.runs.shell.parse.syntax import (
    AndOr,
    ArithmeticClause,
    CaseClause,
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
)
from megaloom.planner.runs.shell.parse.word_parser import NAME

CLOSING = frozenset({"then", "fi", "elif", "else", "do", "done", "esac", "}"})
FUNCTION_NAME = re.compile(r"[^\s;&|<>()$'\"=]+")
FUNCTION = re.compile(r"[^\s;&|<>()$'\"=]+[ \t]*\([ \t]*\)")


class ShellParser(SimpleParser):
    """Reads commands from a source."""

    def program(self, end: str) -> Sequence:
        """Read commands until the closing text, or until the end of the source."""
        result = self.sequence()
        if self.position < len(self.text) and not (end and self.peek(len(end)) == end):
            raise self.refuse()
        if end and self.position >= len(self.text):
            raise self.refuse()
        return result

    def sequence(self) -> Sequence:
        """Read commands until one that closes a compound command."""
        commands: list[Node] = []
        while True:
            self.space(lines=True)
            if self.position >= len(self.text) or self.peek() == ")" or self.peek(2) in (";;", ";&"):
                return Sequence(tuple(commands))
            if self.reserved() in CLOSING:
                return Sequence(tuple(commands))
            commands.append(self.and_or())
            self.space()
            if self.peek() == "&" or (self.peek() == ";" and self.peek(2) not in (";;", ";&")):
                self.position += 1
            elif self.position < len(self.text) and self.peek() not in "\n)" and self.peek(2) not in (";;", ";&"):
                raise self.refuse()

    def keyword(self, word: str) -> None:
        """Step over a reserved word that must come next."""
        self.space(lines=True)
        if self.reserved() != word:
            raise self.refuse()
        self.position += len(word)

    def and_or(self) -> Node:
        """Read commands joined by `&&` and `||`."""
        first = self.pipeline()
        rest: list[tuple[str, Node]] = []
        while True:
            self.space()
            operator = self.peek(2)
            if operator not in ("&&", "||"):
                return AndOr(first, tuple(rest)) if rest else first
            self.position += 2
            self.space(lines=True)
            rest.append((operator, self.pipeline()))

    def pipeline(self) -> Node:
        """Read commands joined by `|`."""
        negated = False
        while self.reserved() in ("!", "time"):
            negated ^= self.reserved() == "!"
            self.position += len(self.reserved())
            self.space()
            if self.reserved() == "-p":
                self.position += 2
                self.space()
        commands = [self.command()]
        self.space()
        while self.peek() == "|" and self.peek(2) != "||":
            self.position += 2 if self.peek(2) == "|&" else 1
            self.space(lines=True)
            commands.append(self.command())
            self.space()
        return Pipeline(tuple(commands), negated) if negated or len(commands) > 1 else commands[0]

    def command(self) -> Node:
        """Read one command with its redirections."""
        start = self.position
        body = self._compound()
        if body is None:
            return self.simple()
        if isinstance(body, FunctionDefinition):
            return body
        redirections = []
        self.space()
        while redirection := self.redirection():
            redirections.append(redirection)
            self.space()
        if start == self.position:
            raise self.refuse()
        return Redirected(body, tuple(redirections)) if redirections else body

    def _compound(self) -> Node | None:
        word = self.reserved()
        if self.peek(2) == "((" and (clause := self._arithmetic_clause()):
            return clause
        if self.peek() == "(":
            self.position += 1
            body = self.program(")")
            self.position += 1
            return Group(body, subshell=True)
        if word == "[[":
            return self.double_bracket()
        readers = {"if": self._if, "while": self._loop, "until": self._loop, "for": self._for, "case": self._case}
        if reader := readers.get(word):
            return reader()
        if word == "{":
            self.position += 1
            body = self.sequence()
            self.keyword("}")
            return Group(body, subshell=False)
        if word == "function" or FUNCTION.match(self.text, self.position):
            return self._function()
        if word in CLOSING or word in ("select", "coproc", "in") or self.peek() in (";", "&", "|", ")", ""):
            raise self.refuse()
        return None

    def _arithmetic_clause(self) -> Node | None:
        start, origin = self.position, self.source.origin(self.position)
        self.position += 2
        expression = self.arithmetic("))")
        if self.accept("))"):
            return ArithmeticClause(expression, origin)
        self.position = start
        return None

    def _if(self) -> Node:
        origin = self.source.origin(self.position)
        branches = []
        self.keyword("if")
        while True:
            condition = self.sequence()
            self.keyword("then")
            branches.append((condition, self.sequence()))
            if self.reserved() != "elif":
                break
            self.keyword("elif")
        otherwise = Sequence(())
        if self.reserved() == "else":
            self.keyword("else")
            otherwise = self.sequence()
        self.keyword("fi")
        return IfClause(tuple(branches), otherwise, origin)

    def _loop(self) -> Node:
        origin, word = self.source.origin(self.position), self.reserved()
        self.keyword(word)
        condition = self.sequence()
        return Loop(condition, self._body(), word == "until", origin)

    def _body(self) -> Sequence:
        self.space(lines=True)
        self.accept(";")
        self.space(lines=True)
        opening, closing = ("{", "}") if self.reserved() == "{" else ("do", "done")
        self.keyword(opening)
        body = self.sequence()
        self.keyword(closing)
        return body

    def _for(self) -> Node:
        origin = self.source.origin(self.position)
        self.keyword("for")
        self.space()
        if self.accept("(("):
            first = self.arithmetic(";")
            self.position += 1
            condition = self.arithmetic(";")
            self.position += 1
            step = self.arithmetic("))")
            if not self.accept("))"):
                raise self.refuse()
            return ForCount(first, condition, step, self._body(), origin)
        name = NAME.match(self.text, self.position)
        if not name:
            raise self.refuse()
        self.position = name.end()
        self.space(lines=True)
        words = None
        if self.reserved() == "in":
            self.keyword("in")
            words = self._words()
        return ForEach(name[0], words, self._body(), origin)

    def _words(self) -> tuple[Parts, ...]:
        words = []
        self.space()
        while self.peek() not in ("", "\n", ";", "&", "|", ")"):
            words.append(self.some_word())
            self.space()
        return tuple(words)

    def _case(self) -> Node:
        origin = self.source.origin(self.position)
        self.keyword("case")
        self.space()
        word = self.some_word()
        self.keyword("in")
        branches: list[tuple[tuple[Parts, ...], Sequence, str]] = []
        while True:
            self.space(lines=True)
            if self.reserved() == "esac":
                self.keyword("esac")
                return CaseClause(word, tuple(branches), origin)
            branches.append(self._case_branch())

    def _case_branch(self) -> tuple[tuple[Parts, ...], Sequence, str]:
        self.accept("(")
        patterns = []
        while True:
            self.space()
            patterns.append(self.some_word())
            self.space()
            if self.accept(")"):
                break
            if not self.accept("|"):
                raise self.refuse()
        body = self.sequence()
        ending = next((e for e in (";;&", ";;", ";&") if self.accept(e)), "")
        if not ending and self.reserved() != "esac":
            raise self.refuse()
        return tuple(patterns), body, ending or ";;"

    def _function(self) -> Node:
        if self.reserved() == "function":
            self.keyword("function")
            self.space()
        name = FUNCTION_NAME.match(self.text, self.position)
        if not name:
            raise self.refuse()
        self.position = name.end()
        self.space()
        if self.accept("("):
            self.space()
            if not self.accept(")"):
                raise self.refuse()
        self.space(lines=True)
        return FunctionDefinition(name[0], self.command())
