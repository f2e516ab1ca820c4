"""Evaluator of what a script starts: other scripts, `eval`, `bash -c`, and programs, which are recorded."""

from __future__ import annotations

import posixpath
from pathlib import Path

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.shell.assignments import CommandWords
from megaloom.planner.runs.shell.branches import Flow
from megaloom.planner.runs.shell.commands import CommandEvaluator
from megaloom.planner.runs.shell.expand.state import State, Status, merged_states
from megaloom.planner.runs.shell.folders import Folders
from megaloom.planner.runs.shell.parse.parser import ShellParser
from megaloom.planner.runs.shell.parse.source import Source, file_source, text_source
from megaloom.planner.runs.shell.parse.text import (
    Text,
    as_word,
    cause,
    displayed,
    joined,
    known_text,
    literal,
    missing,
    quoted,
    shown,
)
from megaloom.planner.runs.shell.sbatch import batch_variables, sbatch_options
from megaloom.planner.runs.words import Origin, Unknown

SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ksh"})
WRAPPERS = frozenset(
    [
        "srun",
        "sbatch",
        "salloc",
        "nohup",
        "numactl",
        "timeout",
        "env",
        "exec",
        "sudo",
        "stdbuf",
        "taskset",
        "setsid",
        "nice",
        "ionice",
        "unbuffer",
        "xargs",
        "time",
        "docker",
        "podman",
        "singularity",
        "apptainer",
        "enroot",
        "shifter",
        "mpirun",
        "mpiexec",
        "orterun",
        "horovodrun",
        "ssh",
        "pdsh",
        "pssh",
        "nsys",
        "ncu",
    ]
)
REMOTE = frozenset({"ssh", "pdsh", "pssh"})
TESTS = frozenset(
    [
        "grep",
        "egrep",
        "fgrep",
        "diff",
        "cmp",
        "which",
        "type",
        "command",
        "hash",
        "pgrep",
        "pidof",
        "getent",
        "ping",
        "curl",
        "nc",
        "nvidia-smi",
        "docker",
    ]
)
"""Programs that scripts use as conditions: whether they succeed is not known. Others are taken to succeed."""
DEEPEST = 30


def resolved_path(path: str) -> Path:
    """Return the path of a file without links and dots, however it was named."""
    return Path(path).resolve()


class ProgramEvaluator(CommandEvaluator):
    """Evaluates all commands; programs are recorded, and nothing is run."""

    def __init__(self, folders: Folders) -> None:
        super().__init__(folders)
        self.depth = 0
        self.started: list[Path | str] = []  # scripts that are evaluated now, and names of written ones
        self.handlers |= {"eval": self._eval, "source": self._source, ".": self._source, "exec": self._exec}

    def parsed(self, source: Source, state: State) -> Flow:
        """Evaluate all commands of a source."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise UserError(f"{source.origin(0)}: scripts start each other more than {DEEPEST} times")
        try:
            return self.execute(ShellParser(source).program(""), state)
        finally:
            self.depth -= 1

    def external(self, words: CommandWords, state: State, origin: Origin) -> Flow:
        """Record a program; follow the scripts and the commands that it is to run."""
        texts = [posixpath.basename(known_text(w) or "") for w in words]
        state.status = Status()
        if texts[0] in TESTS:
            state.status = Status(None, Unknown(texts[0], "command", origin))
        if self._followed(words, texts, state, origin):
            return ""
        if self.capturing:
            state.output += missing(Unknown(texts[0] or displayed(words[0]), "command", origin))
        self.record.add(words, state, origin)
        return ""

    def _followed(self, words: CommandWords, texts: list[str], state: State, origin: Origin) -> bool:
        """Return True if the words start a script or commands that were evaluated instead."""
        wraps = texts[0] in WRAPPERS or bool(cause(words[0]))
        if texts[0] in REMOTE and len(words) > 2 and " " in shown(words[-1]):
            self._inner(text_source(quoted(words[-1], False), origin), words[:-1], (), state)
            return True
        for position, text in enumerate(texts):
            if text in SHELLS:
                return self._shell(words, position, state, origin)
            if text.endswith((".sh", ".slurm", ".sbatch", ".bash")) and not cause(words[position]):
                return self._file(words[:position], words[position:], state)
            if not wraps:
                return False
        return texts[0] == "sbatch" and self._batch(words, state)

    def _batch(self, words: CommandWords, state: State) -> bool:
        for position, word in enumerate(words[1:], 1):
            if not (known_text(word) or "-").startswith("-") and self._file(words[:position], words[position:], state):
                return True
        if state.stdin is not None and all((known_text(word) or "-").startswith("-") for word in words[1:]):
            self._inner(text_source(state.stdin, words[0][0].origin), words, (), state, True)
            return True
        return False

    def _shell(self, words: CommandWords, position: int, state: State, origin: Origin) -> bool:
        rest = position + 1
        while rest < len(words) and (option := known_text(words[rest]) or "").startswith(("-", "+")):
            rest += 1
            if not option.startswith("--") and option.endswith("c") and rest < len(words):
                source = text_source(quoted(words[rest], False), origin)
                self._inner(source, words[:position], words[rest + 1 :], state)
                return True
            if option in ("-o", "-O", "+o"):
                rest += 1
        if rest >= len(words):
            if position == len(words) - 1 and state.stdin is not None:
                self._inner(text_source(state.stdin, origin), words[:position], (), state)
                return True
            return False
        return self._file(words[:position], words[rest:], state)

    def _file(self, prefix: CommandWords, words: CommandWords, state: State) -> bool:
        name = known_text(words[0])
        if name is None:
            return False
        found, is_batch = self._found(name, state), bool(prefix) and shown(prefix[0]) == "sbatch"
        if found is None:
            return False
        written = posixpath.normpath(name)
        started: Path | str = written if written in state.files else resolved_path(found.origin(0).path)
        if is_batch and started in self.started:
            return False  # a job that submits itself again
        self.started.append(started)
        self._inner(found, prefix, words, state, is_batch)
        self.started.pop()
        return True

    def _found(self, name: str, state: State) -> Source | None:
        if (written := state.files.get(posixpath.normpath(name))) is not None:
            return text_source(written, Origin(state.path, 1))
        file = self.folders.read(name, known_text(state.folder))
        return file_source(file[1], file[0]) if file else None

    def _inner(
        self, source: Source, prefix: CommandWords, words: CommandWords, state: State, is_batch: bool = False
    ) -> None:
        """Evaluate another script: it sees the exported variables only; the wrapper's words precede its commands."""
        inner = state.copy()
        inner.variables = {n: v for n, v in state.variables.items() if v.exported}
        inner.functions = {}
        inner.positional, inner.given = tuple(words[1:]), True
        inner.script = words[0] if words else literal("bash", source.origin(0))
        inner.path = source.origin(0).path
        kept, before = list(self.record.prefix), self.locals
        if is_batch:
            inner.variables |= batch_variables(sbatch_options(source.text, inner.path))
        else:
            self.record.prefix += [as_word(w, source.origin(0)) for w in prefix]
        self.locals = []
        self.pending.append({})
        self.started.append(resolved_path(inner.path))
        try:
            self.parsed(source, inner)
        finally:
            self.started.pop()
            self.pending.pop()
            self.record.prefix, self.locals = kept, before
        state.output += inner.output
        state.files = inner.files
        state.status = inner.status

    def _eval(self, words: CommandWords, state: State, origin: Origin) -> Flow:
        text: Text = quoted(joined(words[1:]), False)
        return self.parsed(text_source(text, origin), state)

    def _exec(self, words: CommandWords, state: State, origin: Origin) -> Flow:
        if len(words) == 1:
            return ""
        flow = self.command(words[1:], state, origin)
        return flow or "exit"

    def _source(self, words: CommandWords, state: State, origin: Origin) -> Flow:
        name = known_text(words[1]) if len(words) > 1 else ""
        found = self._found(name, state) if name else None
        if found is None and name and (copy := self.folders.elsewhere(name)):
            found = file_source(copy[1], copy[0])
            self.record.assume(Unknown(f"{name}, read from {copy[0]},", "file", origin))
        if found is None:
            shown_name = displayed(words[1]) if len(words) > 1 else ""
            self.record.unknown.setdefault(Unknown(shown_name, "file", origin))
            self.expander.lacks_files = True
            state.status = Status()
            return ""
        outer = state.path, state.positional, state.given
        state.path = found.origin(0).path
        if len(words) > 2:
            state.positional, state.given = tuple(words[2:]), True
        self.pending.append({})
        flow = self.parsed(found, state)
        pending = self.pending.pop()
        for other, unknown in pending.pop("return", []):
            state.become(merged_states(state, other, unknown))
        state.path = outer[0]
        if len(words) > 2:
            state.positional, state.given = outer[1:]
        return "" if flow == "return" else flow
