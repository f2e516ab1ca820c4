"""Builtins that change variables: declare, export, local, set, shift, read, mapfile, getopts, unset, let."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from attrs import evolve

from megaloom.planner.runs.shell.expand.state import Associative, Indexed, State, Status, Variable, indexed
from megaloom.planner.runs.shell.parse.text import (
    Text,
    cause,
    cut,
    known_text,
    literal,
    missing,
    quoted,
    shown,
    size,
    split_words,
)
from megaloom.planner.runs.words import Origin, Unknown

Builtin = Callable[[State, Sequence[Text], Origin], None]


def _set(state: State, words: Sequence[Text], origin: Origin) -> None:
    texts = [known_text(w) for w in words]
    position = 0
    while position < len(texts) and (text := texts[position]) and text[0] in "-+" and text not in ("-", "--"):
        position += 2 if text[1:].endswith("o") else 1
    if position < len(texts) and texts[position] in ("-", "--"):
        state.positional, state.given = tuple(words[position + 1 :]), True
    elif position < len(texts):
        state.positional, state.given = tuple(words[position:]), True


def _shift(state: State, words: Sequence[Text], origin: Origin) -> None:
    count = int(known_text(words[0]) or 1) if words and (known_text(words[0]) or "").isdecimal() else 1
    if count > len(state.positional):
        state.status = Status(1)
    else:
        state.positional = state.positional[count:]


def _unset(state: State, words: Sequence[Text], origin: Origin) -> None:
    for word in words:
        name = known_text(word) or ""
        item = re.fullmatch(r"(\w+)\[(.+)\]", name)
        if item and (variable := state.variables.get(item[1])):
            if isinstance(variable.value, Indexed) and item[2].isdecimal():
                kept = {i: t for i, t in variable.value.items.items() if i != int(item[2])}
                state.assign(item[1], Indexed(kept))
            elif isinstance(variable.value, Associative):
                state.assign(item[1], Associative({k: t for k, t in variable.value.items.items() if k != item[2]}))
        elif re.fullmatch(r"\w+", name):
            state.variables[state.resolved(name)] = Variable()
            state.functions.pop(name, None)


def _read(state: State, words: Sequence[Text], origin: Origin) -> None:
    names, array, delimiter = _read_options([known_text(w) or "" for w in words])
    if state.stdin is None:
        unknown = Unknown("read", "command", origin)
        for name in names or ["REPLY"]:
            state.assign(name, missing(unknown))
        state.status = Status(None, unknown)
        return
    letters = "".join("\0" if p.unknown else p.text for p in state.stdin)
    if not letters:
        state.status = Status(1)
        for name in names or ["REPLY"]:
            state.assign(name, ())
        return
    end = letters.find(delimiter) if delimiter else -1
    text = cut(state.stdin, 0, end if end >= 0 else None)
    state.stdin = cut(state.stdin, end + 1) if end >= 0 else ()
    separators = state.variables.get("IFS", Variable()).value
    blank = " \t\n" if separators is None or isinstance(separators, Indexed | Associative) else shown(separators)
    fields = split_words(quoted(text, False), blank)
    state.status = Status(0 if end >= 0 or not delimiter else 1)
    if array:
        state.assign(array, indexed([quoted(f) for f in fields]))
        return
    if not names:
        state.assign("REPLY", text)
    for number, name in enumerate(names):
        if number < len(names) - 1:
            state.assign(name, fields[number] if number < len(fields) else ())
        else:
            state.assign(name, _rest(text, fields, number, blank))


def _rest(text: Text, fields: Sequence[Text], number: int, blank: str) -> Text:
    """Return what is left of a line after the first fields, with its separators."""
    if number >= len(fields):
        return ()
    position, letters = 0, "".join("\0" if p.unknown else p.text for p in text)
    for field in fields[:number]:
        plain = "".join("\0" if p.unknown else p.text for p in field)
        position = letters.index(plain, position) + len(plain)
        position += 1
    while position < len(letters) and letters[position] in blank and letters[position] in " \t\n":
        position += 1
    end = len(letters)
    while end > position and letters[end - 1] in blank and letters[end - 1] in " \t\n":
        end -= 1
    return cut(text, position, end)


def _read_options(words: Sequence[str]) -> tuple[list[str], str, str]:
    names, array, delimiter = [], "", "\n"
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("-") or word == "-":
            names += [word] if re.fullmatch(r"[A-Za-z_]\w*", word) else []
            continue
        option = word[-1]
        if option in "adnNptiu" and position < len(words):
            value = words[position]
            position += 1
            array = value if option == "a" else array
            delimiter = value[:1] if option == "d" else delimiter
    return names, array, delimiter


def _mapfile(state: State, words: Sequence[Text], origin: Origin) -> None:
    texts = [known_text(w) or "" for w in words]
    name = next((t for t in reversed(texts) if re.fullmatch(r"[A-Za-z_]\w*", t)), "MAPFILE")
    stdin = missing(Unknown("mapfile", "command", origin)) if state.stdin is None else state.stdin
    strips = any(re.fullmatch(r"-\w*t\w*", t) for t in texts)
    if unknown := cause(stdin):
        state.assign(name, indexed([missing(unknown)]))
        return
    lines, position, letters = [], 0, shown(stdin)
    while position < size(stdin):
        end = letters.find("\n", position)
        end = len(letters) if end < 0 else end
        lines.append(quoted(cut(stdin, position, end if strips else end + 1)))
        position = end + 1
    state.assign(name, indexed(lines))


def _getopts(state: State, words: Sequence[Text], origin: Origin) -> None:
    letters, name = known_text(words[0]) or "", known_text(words[1]) or "" if len(words) > 1 else ""
    arguments = list(words[2:]) or list(state.positional)
    at = int(shown(_text(state, "OPTIND")) or 1) if shown(_text(state, "OPTIND")).isdecimal() else 1
    offset = int(shown(_text(state, "OPTOFFSET")) or 1)
    word = known_text(arguments[at - 1]) if at <= len(arguments) else ""
    if word is None:
        unknown = cause(arguments[at - 1]) or Unknown("getopts", "command", origin)
        state.assign(name, missing(unknown))
        state.status = Status(None, unknown)
        return
    if len(word) < 2 or word[0] != "-" or word == "--":
        state.assign(name, literal("?", origin))
        state.status = Status(1)
        if word == "--":
            state.assign("OPTIND", literal(str(at + 1), origin))
        return
    option = word[offset]
    found = letters.lstrip(":").find(option)
    takes = found >= 0 and letters.lstrip(":")[found + 1 : found + 2] == ":"
    offset += 1
    value: Text = ()
    if takes:
        rest = cut(arguments[at - 1], offset)
        at += 1
        if not rest and at <= len(arguments):
            rest, at = arguments[at - 1], at + 1
        value, offset = rest, 1
    elif offset >= len(word):
        at, offset = at + 1, 1
    state.assign(name, literal(option if found >= 0 else "?", origin))
    state.assign("OPTARG", value)
    state.assign("OPTIND", literal(str(at), origin))
    state.assign("OPTOFFSET", literal(str(offset), origin))
    state.status = Status(0)


def _text(state: State, name: str) -> Text:
    value = state.variables.get(name, Variable()).value
    return () if value is None or isinstance(value, Indexed | Associative) else value


def _ignored(state: State, words: Sequence[Text], origin: Origin) -> None:
    """Leave the state as it is: the builtin changes nothing that a command line depends on."""


def _false(state: State, words: Sequence[Text], origin: Origin) -> None:
    state.status = Status(1)


def _unset_names(names: str) -> dict[str, Builtin]:
    return dict.fromkeys(names.split(), _ignored)


BUILTINS: dict[str, Builtin] = {
    **_unset_names(": true trap wait ulimit umask shopt hash alias unalias disown jobs bg fg history enable bind kill"),
    "false": _false,
    "set": _set,
    "shift": _shift,
    "unset": _unset,
    "read": _read,
    "mapfile": _mapfile,
    "readarray": _mapfile,
    "getopts": _getopts,
}


def declared(state: State, name: str, options: str, value: Text | Indexed | Associative | None, command: str) -> None:
    """Declare a variable with the attributes of `declare -aAxirn`, `export`, `readonly` or `local`."""
    plus = options.startswith("+")
    before = state.variables.get(name if "n" in options else state.resolved(name))
    variable = before or Variable()
    if "n" in options and value is not None and not isinstance(value, Indexed | Associative):
        state.variables[name] = Variable(reference=known_text(value) or "")
        return
    if value is not None:
        variable = evolve(variable, value=value)
    elif "A" in options and not isinstance(variable.value, Associative):
        variable = evolve(variable, value=Associative())
    elif "a" in options and not isinstance(variable.value, Indexed):
        variable = evolve(variable, value=Indexed())
    elif before is None and command in ("export", "readonly"):
        return  # a variable that is exported but was never set stays unknown
    exported = (variable.exported or command == "export" or "x" in options) and not (plus and "x" in options)
    exported = exported and not (command == "export" and "n" in options)
    is_integer = variable.integer or "i" in options
    state.variables[state.resolved(name)] = evolve(variable, exported=exported, integer=is_integer)
