"""Backslash escapes of `$'…'`, `echo -e` and `printf`."""

from __future__ import annotations

import re

_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "v": "\v"}
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{1,2}|u[0-9A-Fa-f]{1,4}|U[0-9A-Fa-f]{1,8}|0?[0-7]{1,3}|.)", re.DOTALL)


def decoded(text: str) -> str:
    r"""Return the text with its escapes replaced; an escape that bash does not know stays as it is.

    >>> decoded(r"a\tb\x41")
    'a\tbA'
    """

    def letter(match: re.Match[str]) -> str:
        escape = match[1]
        if escape[0] in "xuU" and len(escape) > 1:
            return chr(min(int(escape[1:], 16), 0x10FFFF))
        if escape[0] in "01234567":
            return chr(int(escape, 8) & 255)
        return _SIMPLE.get(escape, escape if escape in "\\'\"?" else match[0])

    return _ESCAPE.sub(letter, text)
