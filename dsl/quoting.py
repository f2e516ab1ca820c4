"""Names and values of other people inside of text: on a terminal, in a comment, and as a word of a shell command.

A name of a file, model or cluster may have line breaks, quotes, `$(…)` or codes that change a terminal. Text that we
write has them escaped.
"""

from __future__ import annotations

import re
import shlex
import unicodedata

LONGEST_WORD = 240  # characters without a space that a message shows
LONGEST_LINE = 2_000  # characters of a line that a message shows
CONTROL = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories of characters that a line of text does not hold: controls, formats, surrogates, separators."""


def is_printable(text: str) -> bool:
    """Return True for text that is one line, changes no terminal and can be written as UTF-8."""
    return text.isprintable() or not any(unicodedata.category(c) in CONTROL for c in text)


def printable(text: str) -> str:
    r"""Return the text as one line that changes no terminal: control characters become escapes.

    >>> printable("a\n\x1b[31mb")
    'a\\n\\x1b[31mb'
    """
    if is_printable(text):
        return text
    return "".join(repr(c)[1:-1] if unicodedata.category(c) in CONTROL else c for c in text)


def shortened(text: str, longest: int = LONGEST_WORD) -> str:
    """Return a text of at most `longest` characters: of a longer one, its beginning and its end.

    >>> shortened("abcdefghijkl", 8)
    'abcde…kl'
    """
    if len(text) <= longest:
        return text
    end = longest // 4
    return f"{text[: longest - end - 1]}…{text[-end:]}"


def shown_message(message: str) -> str:
    """Return a message for a terminal: control characters are escaped, and long words and lines lose their middle."""

    def shown(line: str) -> str:
        line = shortened(line, 100 * LONGEST_LINE)  # before the search for words, which takes time
        line = re.sub(rf"\S{{{LONGEST_WORD + 1},}}", lambda word: shortened(word[0]), line)
        return printable(shortened(line, LONGEST_LINE)).replace(r"\t", "\t")

    return "\n".join(map(shown, message.split("\n")))


def shell_word(text: str) -> str:
    r"""Return the text as one word of a bash command, on one line.

    >>> shell_word("a b"), shell_word("a\nb")
    ("'a b'", "$'a\\nb'")
    """
    if is_printable(text):
        return shlex.quote(text)
    return "$'" + "".join(map(_ansi_c, text)) + "'"


def _ansi_c(c: str) -> str:
    r"""Return a character inside of bash's $'…'. A byte of a file name that is no UTF-8 is \xNN."""
    if c in "\\'":
        return f"\\{c}"
    if "\udc80" <= c <= "\udcff":
        return f"\\x{ord(c) - 0xDC00:02x}"
    if unicodedata.category(c) not in CONTROL:
        return c
    if c == "\n":
        return r"\n"
    return "".join(f"\\x{byte:02x}" for byte in c.encode("utf-8", "replace"))
