"""Patterns of `case`, `[[ == ]]` and `${X%pattern}` as regular expressions."""

from __future__ import annotations

import re

from megaloom.planner.runs.shell.parse.text import Text

CLASSES = {"alnum": "a-zA-Z0-9", "alpha": "a-zA-Z", "digit": "0-9", "lower": "a-z", "upper": "A-Z", "space": r"\s"}


def pattern_regex(text: Text, greedy: bool = True) -> str:
    """Return the regular expression of a pattern; quoted characters stand for themselves."""
    letters = [(c, p.quoted) for p in text for c in p.text]
    result, position = "", 0
    repeat = "" if greedy else "?"
    closing: list[str] = []
    while position < len(letters):
        letter, is_quoted = letters[position]
        following = letters[position + 1] if position + 1 < len(letters) else ("", True)
        position += 1
        if is_quoted:
            result += re.escape(letter)
        elif letter in "@?*+!" and following == ("(", False):
            result += "(?!" if letter == "!" else "(?:"
            closing.append({"@": ")", "?": ")?", "*": ")*", "+": ")+", "!": ").*"}[letter])
            position += 1
        elif closing and letter in "|)":
            result += "|" if letter == "|" else closing.pop()
        elif letter == "*":
            result += ".*" + repeat
        elif letter == "?":
            result += "."
        elif letter == "[" and (end := _bracket_end(letters, position)):
            result += _bracket("".join(c for c, _ in letters[position:end]))
            position = end + 1
        else:
            result += re.escape(letter)
    return result + "".join(reversed(closing))


def _bracket_end(letters: list[tuple[str, bool]], start: int) -> int:
    position = start + 1 if start < len(letters) and letters[start][0] in "!^" else start
    position += 1  # a `]` that comes first is a member
    while position < len(letters):
        if letters[position][0] == "[" and position + 1 < len(letters) and letters[position + 1][0] == ":":
            position += 2
            while position < len(letters) and letters[position][0] != "]":
                position += 1
        elif letters[position][0] == "]":
            return position
        position += 1
    return 0


def _bracket(members: str) -> str:
    negated = members[0] in "!^"
    members = members[negated:].replace("\\", r"\\").replace("]", r"\]").replace("[", r"\[")
    for name, letters in CLASSES.items():
        members = members.replace(rf"\[:{name}:\]", letters)
    return f"[{'^' * negated}{members}]"


def matches(text: str, pattern: Text) -> bool:
    """Return True if the whole text matches the pattern."""
    return re.fullmatch(pattern_regex(pattern), text, re.DOTALL) is not None
