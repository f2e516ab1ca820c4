"""Checks of names and texts: one definition per public name, no replaced word, docstrings and messages that read well.

`python -m tests.support.vocabulary [FOLDER ...]` lists what is wrong in these folders.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import ROOT

PACKAGES = ("dsl", "planner", "runtime")
LONGEST = 30  # words of a sentence in a message
OPENINGS = (
    "What",
    "How",
    "Whether",
    "Where",
    "Which",
    "The same",
    "Both",
    "Those",
    "These",
    "It ",
    "They ",
    "As above",
)
MESSAGES = {"UserError", "ShapeError", "PlanError", "Refusal", "Violation", "Rule", "Limit", "note", "add_note"}

GLOSSARY = ROOT / "docs" / "glossary.md"


def glossary() -> tuple[dict[str, str], dict[str, str]]:
    """Return the two tables of docs/glossary.md: each word with its meaning, each replaced word with its replacement.

    A cell may list several words: "cut point, boundary". Remarks in parentheses are left out.
    """
    before, after = GLOSSARY.read_text().split("<!-- replaced -->")
    return _table(before), _table(after)


def _table(text: str) -> dict[str, str]:
    rows = [line.strip("| ").split(" | ", 1) for line in text.splitlines() if line.startswith("| ")][1:]
    return {word.strip(): right for left, right in rows for word in re.sub(r"\(.*?\)", "", left).split(",")}


def sources(folders: list[str]) -> list[Path]:
    """Return the Python files of these folders, relative to the repository."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def public(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """Yield (qualified name, definition) of each public function, class, constant, method and field of a file."""

    def named(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.AST]]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                if not node.name.startswith("_"):
                    yield prefix + node.name, node
                    if isinstance(node, ast.ClassDef):
                        yield from named(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name in (n for t in targets for n in ast.walk(t)):
                    if isinstance(name, ast.Name) and not name.id.startswith("_"):
                        yield prefix + name.id, node

    yield from named(ast.parse(path.read_text()).body, "")


def repeated_names(package: str) -> list[str]:
    """Return the public module-level names that two modules of a package define."""
    users = defaultdict(set)
    for path in sources([package]):
        for name, _ in public(path):
            if "." not in name and path.name != "__init__.py":
                users[name].add(path.relative_to(ROOT).as_posix())
    return [f"{name}: {', '.join(sorted(files))}" for name, files in sorted(users.items()) if len(files) > 1]


def replaced_names(folders: list[str]) -> list[str]:
    """Return the file stems and public identifiers that are replaced words."""
    replaced = {word.replace(" ", "_").lower() for word in glossary()[1]}
    out = []
    for path in sources(folders):
        where = path.relative_to(ROOT).as_posix()
        out += [f"{where}: file name"] if path.stem in replaced else []
        out += [f"{where}: {name}" for name, _ in public(path) if name.rpartition(".")[2].lower() in replaced]
    return out


def vague_docstrings(folders: list[str]) -> list[str]:
    """Return the public definitions whose docstring opens with a question word or speaks of a neighbour."""
    out = []
    for path in sources(folders):
        where, tree = path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())
        documented = [("module", tree), *public(path)]
        for name, node in documented:
            if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                opening = next((o for o in OPENINGS if re.match(re.escape(o.strip()) + r"\b", text)), None)
                out += [f"{where}: {name}: {text.splitlines()[0]}"] if opening else []
    return out


def long_messages(folders: list[str]) -> list[str]:
    """Return the sentences of messages that have more than 30 words."""
    out = []
    for path in sources(folders):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in MESSAGES:
                for text in filter(None, map(_text, [*node.args, *(k.value for k in node.keywords)])):
                    for sentence in re.split(r"[.;:]\s|\n", text):
                        if len(sentence.split()) > LONGEST:
                            out.append(f"{path.relative_to(ROOT)}:{node.lineno}: {sentence}")
    return out


def _text(node: ast.AST) -> str:
    """Return a string literal, or an f-string with each expression as one word; empty for other nodes."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
    return ""


CHECKS = {"replaced word": replaced_names, "vague docstring": vague_docstrings, "long message": long_messages}


def main(folders: list[str]) -> int:
    """Print what is wrong in these folders; return the exit status."""
    wrong = [f"{kind}: {row}" for kind, check in CHECKS.items() for row in check(folders)]
    wrong += [
        f"defined twice: {row}" for package in PACKAGES for row in repeated_names(package) if _about(row, folders)
    ]
    print(*wrong, sep="\n")
    print(f"{len(wrong)} to mend")
    return bool(wrong)


def _about(row: str, folders: list[str]) -> bool:
    return any(file.startswith(folder) for folder in folders for file in row.partition(": ")[2].split(", "))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(PACKAGES)))
