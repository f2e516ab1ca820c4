"""Modules of the runtime do not import each other in a circle, imports inside functions and for types included."""

import ast
from itertools import chain

import networkx

from tests.support.paths import ROOT

PACKAGE = ROOT / "runtime"


def imported(path: str, tree: ast.AST) -> set[str]:
    """Return the modules of the runtime that a module imports, by their names below the package."""
    folder = path.split(".")[:-1]
    names: set[str] = set()
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)):
        module = (node.module or "").split(".")
        if node.level:
            base = [*folder[: len(folder) - node.level + 1], *(part for part in module if part)]
        elif module[:2] == ["megaloom", "runtime"]:
            base = module[2:]
        else:
            continue
        names |= {".".join(base), *(".".join([*base, alias.name]) for alias in node.names)}
    return names


def test_no_modules_import_each_other() -> None:
    trees = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): ast.parse(path.read_text())
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }
    edges = ((name, other) for name, tree in trees.items() for other in imported(name, tree) if other in trees)
    cycles = [sorted(c) for c in networkx.strongly_connected_components(networkx.DiGraph(chain(edges))) if len(c) > 1]
    assert cycles == []
