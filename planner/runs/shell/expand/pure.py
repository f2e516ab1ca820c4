"""Programs whose output depends on their arguments and input alone; each returns what it prints, or None to decline."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Sequence

from megaloom.planner.runs.shell.expand.arithmetic import ArithmeticSyntaxError, Variables, evaluate_arithmetic

Program = Callable[[Sequence[str], str], str | None]
_MOST_NUMBERS = 100_000


def _dirname(words: Sequence[str], _: str) -> str | None:
    return "".join(f"{posixpath.dirname(w.rstrip('/') or w) or '.'}\n" for w in words) if words else None


def _basename(words: Sequence[str], _: str) -> str | None:
    if words[:1] == ["-s"] and len(words) == 3:
        words = [words[2], words[1]]
    if not words or words[0].startswith("-") or len(words) > 2:
        return None
    name = posixpath.basename(words[0].rstrip("/") or "/")
    suffix = words[1] if len(words) > 1 else ""
    return (name.removesuffix(suffix) if name != suffix else name) + "\n"


def _seq(words: Sequence[str], _: str) -> str | None:
    separator = "\n"
    words = list(words)
    while words and words[0].startswith("-s"):
        separator = words.pop(0)[2:] or (words.pop(0) if words else "\n")
    if not 1 <= len(words) <= 3 or not all(re.fullmatch(r"-?\d+", w) for w in words):
        return None
    numbers = [int(w) for w in words]
    first, step, last = (
        (1, 1, *numbers)
        if len(numbers) == 1
        else ((numbers[0], 1, numbers[1]) if len(numbers) == 2 else (numbers[0], numbers[1], numbers[2]))
    )
    if step == 0 or abs(last - first) // abs(step) > _MOST_NUMBERS:
        return None
    found = [str(n) for n in range(first, last + (1 if step > 0 else -1), step)]
    return separator.join(found) + "\n" * bool(found)


def _expr(words: Sequence[str], _: str) -> str | None:
    if any(not re.fullmatch(r"-?\d+|[-+*/%()<>=]|[<>!]=", w) for w in words):
        return None
    return _calculated(" ".join("==" if w == "=" else w for w in words))


def _bc(words: Sequence[str], stdin: str) -> str | None:
    text = stdin.strip().removeprefix("scale=0;").strip()
    return _calculated(text) if not words and re.fullmatch(r"[\d+*/%() -]+", text) else None


def _calculated(text: str) -> str | None:
    def refuse(name: str, index: int | None) -> int:
        raise ArithmeticSyntaxError

    decimal = re.sub(r"\b0+(?=\d)", "", text)
    try:
        return f"{evaluate_arithmetic(decimal, Variables(refuse, lambda *_: None))}\n"
    except ArithmeticSyntaxError:
        return None


_SETS = {
    "[:upper:]": "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "[:lower:]": "abcdefghijklmnopqrstuvwxyz",
    "[:digit:]": "0123456789",
    "[:space:]": " \t\n\r\v\f",
}


def _set(text: str) -> str:
    for name, letters in _SETS.items():
        text = text.replace(name, letters)
    text = text.replace("\\n", "\n").replace("\\t", "\t")
    return re.sub(r"(\w)-(\w)", lambda m: "".join(map(chr, range(ord(m[1]), ord(m[2]) + 1))), text)


def _tr(words: Sequence[str], stdin: str) -> str | None:
    options = "".join(w[1:] for w in words if w.startswith("-") and len(w) > 1)
    sets = [_set(w) for w in words if not (w.startswith("-") and len(w) > 1)]
    if options == "d" and len(sets) == 1:
        return "".join(c for c in stdin if c not in sets[0])
    if options == "s" and len(sets) == 1:
        return re.sub(rf"([{re.escape(sets[0])}])\1+", r"\1", stdin)
    if options or len(sets) != 2 or not sets[1]:
        return None
    return stdin.translate({ord(a): sets[1][min(n, len(sets[1]) - 1)] for n, a in reversed(list(enumerate(sets[0])))})


def _cut(words: Sequence[str], stdin: str) -> str | None:
    options: dict[str, str] = dict(re.findall(r"-([dfc])\s?(.[^ ]*)", " ".join(w if w != " " else "\0" for w in words)))
    delimiter = options.get("d", "\t").replace("\0", " ")
    chosen = re.fullmatch(r"(\d*)(-?)(\d*)", options.get("f", options.get("c", "")))
    if not chosen or len(delimiter) != 1 or not (chosen[1] or chosen[3]):
        return None
    first = int(chosen[1] or 1) - 1
    last = first + 1 if not chosen[2] else int(chosen[3]) if chosen[3] else None
    lines = []
    for line in stdin.removesuffix("\n").split("\n"):
        if "c" in options:
            lines.append(line[first:last])
        else:
            lines.append(delimiter.join(line.split(delimiter)[first:last]) if delimiter in line else line)
    return "".join(f"{line}\n" for line in lines)


def _wc(words: Sequence[str], stdin: str) -> str | None:
    counts = {"-w": len(stdin.split()), "-l": stdin.count("\n"), "-c": len(stdin.encode()), "-m": len(stdin)}
    return f"{counts[words[0]]}\n" if len(words) == 1 and words[0] in counts else None


def _head(words: Sequence[str], stdin: str) -> str | None:
    number = re.fullmatch(r"-(?:n ?)?(\d+)", " ".join(words) or "-10")
    return "".join(stdin.splitlines(keepends=True)[: int(number[1])]) if number else None


def _tail(words: Sequence[str], stdin: str) -> str | None:
    number = re.fullmatch(r"-(?:n ?)?(\d+)", " ".join(words) or "-10")
    lines = stdin.splitlines(keepends=True)
    return "".join(lines[max(0, len(lines) - int(number[1])) :]) if number else None


def _xargs(words: Sequence[str], stdin: str) -> str | None:
    return " ".join(stdin.split()) + "\n" if not words and not set(stdin) & set("'\"\\") else None


def _sed(words: Sequence[str], stdin: str) -> str | None:
    """Replace plain text: `s/a/b/` and `s/a/b/g` without characters of regular expressions."""
    command = re.fullmatch(r"s(.)((?:(?!\1).)+)\1((?:(?!\1).)*)\1(g?)", words[0]) if len(words) == 1 else None
    if not command or re.search(r"[\[\]\\.*^$&]", command[2] + command[3]):
        return None
    lines = stdin.splitlines(keepends=True)
    return "".join(line.replace(command[2], command[3], -1 if command[4] else 1) for line in lines)


def found_by_grep(words: Sequence[str], stdin: str) -> bool | None:
    """Return whether `grep -q TEXT` finds a plain text in its input; None for patterns and other options."""
    options = [word for word in words[: words.index("--") if "--" in words else len(words)] if word.startswith("-")]
    texts = words[words.index("--") + 1 :] if "--" in words else [word for word in words if word not in options]
    letters = set("".join(options).replace("-", ""))
    if "q" not in letters or not letters <= set("qFEs") or len(texts) != 1:
        return None
    if "F" not in letters and re.search(r"[\[\]\\.*^$+?(){}|]", texts[0]):
        return None
    return any(texts[0] in line for line in stdin.splitlines())


PURE_PROGRAMS: dict[str, Program] = {
    "dirname": _dirname,
    "basename": _basename,
    "seq": _seq,
    "expr": _expr,
    "bc": _bc,
    "tr": _tr,
    "cut": _cut,
    "wc": _wc,
    "head": _head,
    "tail": _tail,
    "xargs": _xargs,
    "sed": _sed,
}
FILTERS = frozenset({"bc", "tr", "cut", "wc", "head", "tail", "xargs", "sed"})
"""Programs that read their input."""
READING_FILES = frozenset({"sed", "head", "tail", "cut"})
"""Programs that read the file that their last argument names, if there is one."""
