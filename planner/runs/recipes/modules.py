"""Python files by the names of their modules: beside a script, in folders above it, or installed. Never imported."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path

from attrs import define, field, frozen

from megaloom.planner.runs.python_text import parsed_python
from megaloom.planner.runs.shell.folders import MOST_BYTES
from megaloom.planner.runs.words import Origin


@frozen(eq=False)
class PythonModule:
    """A parsed file: its functions, classes and assignments, and the names that it imports, as module and name."""

    path: str
    package: str  # of relative imports
    tree: ast.Module
    functions: dict[str, ast.FunctionDef]
    constants: dict[str, ast.expr]
    imports: dict[str, tuple[str, str]]
    classes: dict[str, ast.ClassDef] = field(factory=dict)
    name: str = ""

    def origin(self, node: ast.expr | ast.stmt) -> Origin:
        """Return the line of a node."""
        return Origin(self.path, node.lineno)


def parsed_module(text: str, path: str, name: str = "") -> PythonModule:
    """Return a parsed text. Raise UserError with the line that is not Python, which is never shown."""
    tree = parsed_python(text, path)
    module = PythonModule(
        path, name.rpartition(".")[0] if not path.endswith("__init__.py") else name, tree, {}, {}, {}, name=name
    )
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            module.functions[node.name] = node
        elif isinstance(node, ast.ClassDef):
            module.classes[node.name] = node
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            module.constants[node.targets[0].id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            module.constants[node.target.id] = node.value
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module.imports.update(imported_names(node, module.package))
    return module


def imported_names(node: ast.Import | ast.ImportFrom, package: str) -> dict[str, tuple[str, str]]:
    """Return the names that an import binds, each with its module and its name there; empty for the module itself."""
    if isinstance(node, ast.Import):
        return {(one.asname or one.name.partition(".")[0]): (one.name, "") for one in node.names}
    above = package.split(".") if package else []
    base = ".".join([*above[: len(above) - node.level + 1], *([node.module] if node.module else [])])
    source = base if node.level else node.module or ""
    return {one.asname or one.name: (source, one.name) for one in node.names}


@define
class ModuleFiles:
    """Finds files of modules. script: the path of the file that was given."""

    script: Path
    other_name: Callable[[str], str | None] = lambda name: None  # of a module that a package imports under this name
    read: dict[str, PythonModule | None] = field(factory=dict)

    def module(self, name: str) -> PythonModule | None:
        """Return a module by its dotted name, or None if its file is not there."""
        if name not in self.read:
            self.read[name] = self._parsed(name)
            if self.read[name] is None and (other := self.other_name(name)) is not None:
                self.read[name] = self._parsed(other)
        return self.read[name]

    def _parsed(self, name: str) -> PythonModule | None:
        relative = Path(*name.split(".")) if name else Path()
        above = [one for folder in self.script.absolute().parents for one in (folder, folder / "src")]
        for folder in (*above, *(Path(one) for one in sys.path if one)):
            for path in (folder / relative.with_suffix(".py"), folder / relative / "__init__.py") if name else ():
                try:
                    if path.is_file() and path.stat().st_size <= MOST_BYTES:
                        return parsed_module(path.read_bytes().decode(errors="replace"), str(path), name)
                except OSError:
                    continue
        return None

    def name_of(self, path: Path) -> str:
        """Return the dotted name of a file, from the first folder above it that is no package."""
        parts = [path.stem] if path.stem != "__init__" else []
        for folder in path.absolute().parents:
            if not (folder / "__init__.py").is_file():
                break
            parts.insert(0, folder.name)
        return ".".join(parts)
