"""Output of `echo` and `printf`; the pieces of their arguments keep their origins."""

from __future__ import annotations

import re
from collections.abc import Sequence

from attrs import evolve

from megaloom.planner.runs.shell.parse.escapes import decoded
from megaloom.planner.runs.shell.parse.text import Text, cause, joined, known_text, literal, missing, quoted, shown
from megaloom.planner.runs.words import Origin

_DIRECTIVE = re.compile(r"%%|%([-+ 0#]*)(\d*)(?:\.(\d+))?([sdiuxXocbqfgeE])|%(.?)")


def echoed(words: Sequence[Text], origin: Origin) -> Text:
    """Return what `echo` prints."""
    end, escapes = "\n", False
    words = list(words)
    while words and re.fullmatch(r"-[neE]+", known_text(words[0]) or ""):
        option = shown(words.pop(0))
        end = "" if "n" in option else end
        escapes = "e" in option
    text = joined([quoted(w, False) for w in words])
    if escapes:
        text = tuple(evolve(p, text=decoded(p.text)) for p in text)
    return text + literal(end, origin)


def formatted(words: Sequence[Text], origin: Origin) -> Text:
    """Return what `printf` prints."""
    words = words[1:] if words and known_text(words[0]) == "--" else words
    if not words:
        return ()
    if (unknown := cause(words[0])) is not None:
        return missing(unknown)
    template, arguments = shown(words[0]), list(words[1:])
    result: Text = ()
    while True:
        before = len(arguments)
        result += _round(template, arguments, words[0][0].origin if words[0] else origin)
        if not arguments or len(arguments) == before:
            return result


def _round(template: str, arguments: list[Text], origin: Origin) -> Text:
    result: Text = ()
    position = 0
    for match in _DIRECTIVE.finditer(template):
        result += literal(decoded(template[position : match.start()]), origin)
        position = match.end()
        if match[0] == "%%":
            result += literal("%", origin)
        elif match[4]:
            result += _converted(match, arguments.pop(0) if arguments else (), origin)
    return result + literal(decoded(template[position:]), origin)


def _converted(match: re.Match[str], argument: Text, origin: Origin) -> Text:
    flags, width, precision, letter = match[1], match[2], match[3], match[4]
    if cause(argument):
        return quoted(argument, False)
    if letter in "sbq" and not width and precision is None:
        text = tuple(evolve(p, text=decoded(p.text)) for p in argument) if letter == "b" else argument
        return quoted(text, False)
    plain = shown(argument)
    spec = f"%{flags}{width}" + (f".{precision}" if precision is not None else "")
    try:
        if letter in "sbqc":
            value = spec + "s"
            return literal(value % (plain[:1] if letter == "c" else plain), origin)
        if letter in "diu":
            return literal((spec + "d") % int(plain or "0", 0 if plain[:2] in ("0x", "0X") else 10), origin)
        if letter in "xXo":
            return literal((spec + letter) % int(plain or "0"), origin)
        return literal((spec + letter) % float(plain or "0"), origin)
    except ValueError:
        return literal(spec % 0 if False else "0", origin)
