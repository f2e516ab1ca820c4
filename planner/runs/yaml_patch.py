"""Changes of flags in the lines of a YAML file with Megatron's names: values, switches, and keys that are new."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .run import Edit
from .words import Word

_LINE = re.compile(r"(?P<key>\s*[A-Za-z_]\w*\s*:\s+)(?P<value>[^#\s][^#\r\n]*?)(?P<rest>\s*(?:#.*)?[\r\n]*)")


def replace_key(lines: list[str], path: str, edit: Edit) -> bool:
    """Change the value of a key that states a flag; return whether a line has it. A flag to be removed is null."""
    number = _line_of(edit.old[0], path, lines)
    found = None if number is None else _LINE.fullmatch(lines[number])
    if number is None or found is None or found["value"].startswith(("[", "{", "&", "*", "|", ">", "${")):
        return False
    if not edit.new and _name(found["key"]) != _flag(edit):
        return False  # null may mean something else under another name
    lines[number] = f"{found['key']}{_value(edit)}{found['rest']}"
    return True


def insert_key(lines: list[str], path: str, edit: Edit) -> bool:
    """Write a new key after one that states a flag beside which it may stand; return whether there is one."""
    for words in edit.after:
        number = _line_of(words[0], path, lines)
        found = None if number is None else _LINE.fullmatch(lines[number])
        if number is not None and found is not None:
            indent = found["key"][: len(found["key"]) - len(found["key"].lstrip())]
            ending = "" if lines[number].endswith("\n") else "\n"
            lines[number] += f"{ending}{indent}{_flag(edit)}: {_value(edit)}{'' if ending else chr(10)}"
            return True
    return False


def _line_of(flag: Word, path: str, lines: Sequence[str]) -> int | None:
    number = flag.origin.line_number - 1
    return number if flag.origin.path == path and 0 <= number < len(lines) else None


def _name(key: str) -> str:
    return key.strip().rstrip(":").strip()


def _flag(edit: Edit) -> str:
    return edit.flag.removeprefix("--").replace("-", "_")


def _value(edit: Edit) -> str:
    if not edit.new:
        return "false" if len(edit.old) == 1 else "null"
    values = edit.new[1:]
    return "true" if not values else values[0] if len(values) == 1 else f"[{', '.join(values)}]"
