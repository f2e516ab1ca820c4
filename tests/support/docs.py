"""Writes the generated sections of README.md and docs/: tables, commands, examples, a plan.

A section stands between `<!-- begin NAME -->` and `<!-- end NAME -->`. `python -m tests.support.docs` lists the pages
that are out of date; with `--update` it writes them anew.
"""

from __future__ import annotations

import ast
import inspect
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import cache, partial
from importlib import import_module
from inspect import getmodule
from math import log10
from pathlib import Path
from textwrap import dedent

from tests.support import ops_page
from tests.support.coming_from import sections
from tests.support.parity import nccl_rows
from tests.support.paths import ROOT
from tests.support.recommended_table import recommended_table

SECTION = re.compile(r"(<!-- begin (\w+) -->\n)(.*?)(<!-- end \2 -->)", re.DOTALL)
PLAN = ("llama3-8b", "--gpus", "64xH100", "--seq", "8192", "--batch", "512")
REASONS = 4  # of "Why" that the README shows
OURS = {"stdlib-gpt", "own-layer", "own-module"}  # small examples that nobody published
COMMANDS = {
    "plan": "megaloom.planner.cli",
    **dict.fromkeys(
        (
            *("data", "train", "evaluate", "generate", "convert", "pack", "unpack"),
            *("verify", "show", "measure", "calibrate", "explain", "compare", "report", "export"),
        ),
        "megaloom.runtime.cli",
    ),
}


def pages() -> list[Path]:
    """Return README.md and every page of docs/ that has a generated section."""
    results = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in results if SECTION.search(page.read_text())]


def written(page: Path) -> str:
    """Return the text of a page with its generated sections as they should be now."""

    def section(result: re.Match[str]) -> str:
        return f"{result[1]}{SECTIONS[result[2]]().strip()}\n{result[4]}"

    return SECTION.sub(section, page.read_text())


def _code(text: str, language: str = "") -> str:
    return f"```{language}\n{text.strip()}\n```"


def _own_layer() -> str:
    source = (ROOT / "examples" / "own_layer.py").read_text()
    (layer,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    first = min(d.lineno for d in layer.decorator_list)
    return _code("\n".join(source.splitlines()[first - 1 : layer.end_lineno]), "python")


def _own_loop() -> str:
    source = (ROOT / "examples" / "scripts" / "own_loop.py").read_text()
    return _code(source[source.index("from pathlib") :].partition("\n\nif __name__")[0], "python")


def _definitions(script: str, *names: str) -> str:
    """Return functions and classes of a program in examples/scripts."""
    source = (ROOT / "examples" / "scripts" / f"{script}.py").read_text()
    found = {
        node.name: "\n".join(source.splitlines()[_first_line(node) - 1 : node.end_lineno])
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    return _code("\n\n\n".join(found[name] for name in names), "py")


def _first_line(node: ast.ClassDef | ast.FunctionDef) -> int:
    return min((node.lineno, *(d.lineno for d in node.decorator_list)))


def _own_torch_module() -> str:
    source = (ROOT / "examples" / "scripts" / "own_torch_module.py").read_text()
    return _code(source[source.index("class Decoder") :].partition("\n\nif __name__")[0], "py")


def _own_module() -> str:
    source = (ROOT / "examples" / "own_module.py").read_text()
    (layer,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    methods = {
        node.name: ast.get_source_segment(source, node, padded=True)
        for node in layer.body
        if isinstance(node, ast.FunctionDef)
    }
    return _code("\n\n\n".join(dedent(methods[name] or "") for name in ("module", "parameters")), "python")


def _plan() -> str:
    from megaloom.planner.cli.main import main

    out = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(out):
        main([*PLAN, "-o", str(Path(folder) / "plan.json")])
    text = re.sub(r"; searched for [\d.]+ s", "", out.getvalue())
    *head, why = text.split("\n\n")[:4]
    reasons = "\n".join([*why.splitlines()[: 1 + REASONS], "…"])
    return _code("$ plan " + " ".join(PLAN) + "\n" + "\n\n".join([*head, reasons]))


def _accuracy() -> str:
    return (ROOT / "docs" / "accuracy" / "summary.md").read_text()


def parameter_counts() -> dict[str, int]:
    """Return the number of parameters of each published model of the examples."""
    from megaloom.dsl import params
    from megaloom.dsl.catalog import examples
    from tests.support.models.examples import example

    return {name: params(example(name)) for name in examples() if name not in OURS}


def _families() -> str:
    return "\n".join(_family_rows())


def _family_rows() -> Iterator[str]:
    from megaloom.dsl.catalog import examples
    from megaloom.dsl.example_modules import example_modules
    from megaloom.dsl.hf.architectures import Reader

    counts = parameter_counts()
    module_of = {name: ref.partition(":")[0] for name, ref in examples().items() if name in counts}
    yield "| family | trained | models and their parameters | reads a config.json of |"
    yield "|---|---|---|---|"
    for module in (m for m in example_modules() if m.__name__ in module_of.values()):
        family = module.__name__.rpartition(".")[2]
        names = [name for name, module_name in module_of.items() if module_name == module.__name__]
        sizes = ", ".join(f"`{name}` {short(counts[name])}" for name in names)
        readers = [it for it in vars(module).values() if isinstance(it, Reader) and getmodule(it.model) is module]
        reads = ", ".join(f"`{a}`" for r in readers for a in r.architectures)
        untrained = [name for name in names if not trained(name)]
        mark = (
            "yes"
            if not untrained
            else "**not yet**"
            if untrained == names
            else "not " + ", ".join(f"`{n}`" for n in untrained)
        )
        yield f"| [{family}](../../examples/{family}.py) | {mark} | {sizes} | {reads} |"


def trained(name: str) -> bool:
    """Return whether the runtime trains the model of this name."""
    from megaloom.dsl import graph
    from megaloom.planner.rules.capabilities import untrainable
    from tests.support.models.examples import example

    return untrainable(graph(example(name))) is None


def short(n: int) -> str:
    """Return a number of parameters in three digits: 8.03 B."""
    value, unit = (n / 1e9, "B") if n >= 999.5e6 else (n / 1e6, "M")
    return f"{value:.{max(0, 2 - int(log10(value)))}f} {unit}" if value >= 1 else f"{value:.2f} {unit}"


def _rules() -> str:
    from megaloom.planner.report.lint import ALL_RULES, HEADINGS

    lines = []
    for owner, heading in HEADINGS.items():
        lines += [
            f"## {heading[0].upper()}{heading[1:]}",
            "",
            "| rule | every legal layout | instead | source |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| `{r.id}` | {_cell(r.sentence)} | {_cell(r.fix)} | {_cell(r.source)} |"
            for r in ALL_RULES
            if r.owner is owner
        ]
        lines += [""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


@cache
def _help(command: str) -> str:
    words = [] if command == "plan" else [command]
    run = [sys.executable, "-m", COMMANDS[command], *words, "--help"]
    done = subprocess.run(
        run, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    )
    return done.stdout


def _command_line() -> str:
    return "\n\n".join(f"## {'plan' if c == 'plan' else f'megaloom {c}'}\n\n{_code(_help(c))}" for c in COMMANDS)


def _plan_json() -> str:
    from attrs import fields, has

    from megaloom.planner import Plan
    from megaloom.planner.contract.layout import FIELDS, Layout

    lines, todo, seen = list[str](), [Plan], set[type]()
    while todo:
        kind = todo.pop(0)
        if kind in seen:
            continue
        seen.add(kind)
        summary = (inspect.getdoc(kind) or "").splitlines()[0]
        lines += [f"## {kind.__name__}", "", summary, "", "| field | type | meaning |", "|---|---|---|"]
        meanings = {name: f.help for name, f in FIELDS.items()} if kind is Layout else _meanings(kind)
        for f in fields(kind):
            if f.name.startswith("_") or not f.init:
                continue
            # The annotation as written: cattrs replaces `f.type` when it first loads a plan.
            shown = FIELDS[f.name].kind.__name__ if kind is Layout else kind.__annotations__[f.name]
            lines.append(f"| `{f.name}` | `{_cell(str(shown))}` | {_cell(meanings[f.name])} |")
            todo += [
                k
                for k in vars(sys.modules[kind.__module__]).values()
                if inspect.isclass(k) and has(k) and re.search(rf"\b{k.__name__}\b", str(shown))
            ]
        lines += [""]
    return "\n".join(lines)


def _meanings(kind: type) -> dict[str, str]:
    """Return what the source of a class says of each field: the string after it, else the comment on its last line."""
    source = dedent(inspect.getsource(kind))
    lines, (owner,) = source.splitlines(), ast.parse(source).body
    assert isinstance(owner, ast.ClassDef)
    out = {}
    for statement, following in zip(owner.body, [*owner.body[1:], ast.Pass()], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = following.value.value if isinstance(following, ast.Expr) else None  # type: ignore[attr-defined]
            comment = re.search(r"  # (.*)", lines[(statement.end_lineno or 1) - 1])
            found = text or (comment[1] if comment else "")
            assert found, f"{kind.__name__}.{statement.target.id} needs a comment that says what it is"
            out[statement.target.id] = f"{found[0].upper()}{found[1:].rstrip('.')}."
    return out


def _python_api() -> str:
    out = []
    for name in ("dsl", "planner", "runtime"):
        package = import_module(f"megaloom.{name}")
        out += [f"## megaloom.{name}", "", (package.__doc__ or "").splitlines()[0], "", "| name | |", "|---|---|"]
        for public in sorted(package.__all__, key=str.lower):
            doc = (
                inspect.getdoc(getattr(package, public))
                if inspect.isclass(it := getattr(package, public)) or callable(it)
                else ""
            )
            out.append(f"| `{public}` | {_cell((doc or '').split(chr(10) + chr(10))[0])} |")
        out += [""]
    return "\n".join(out)


def _devices() -> str:
    from megaloom.planner.contract.devices import GiB
    from megaloom.planner.hardware.presets import PRESETS

    lines = [
        "| device | memory | bf16 | link within a node | network, for each device | node |",
        "|---|---|---|---|---|---|",
    ]
    for name, preset in PRESETS.items():
        device, intra, inter = preset.device, preset.intra, preset.inter
        peak = device.flops.get("bf16") or device.flops["fp16"]
        precision = "" if "bf16" in device.flops else " (fp16)"
        largest = (
            f"up to {preset.domain} in trays of {preset.tray}" if preset.tray < preset.domain else f"{preset.tray}"
        )
        lines.append(
            f"| `{name}` | {device.nbytes / GiB:.1f} GiB | {peak / 1e12:,.4g} TFLOP/s{precision} "
            f"| {intra.name}, {intra.bandwidth / 1e9:g} GB/s | {inter.name}, {inter.bandwidth / 1e9:g} GB/s "
            f"| {'one' if name == 'CPU' else largest} |"
        )
    return "\n".join(lines)


def _map() -> str:
    lines = ["| folder | what is in it | files |", "|---|---|---|"]
    for top in ("dsl", "planner", "runtime", "examples"):
        for init in sorted((ROOT / top).rglob("__init__.py"), key=lambda p: p.parts):
            folder = init.parent.relative_to(ROOT).as_posix()
            summary = (ast.get_docstring(ast.parse(init.read_text())) or "").splitlines()[0]
            files = ", ".join(f"`{p.stem}`" for p in sorted(init.parent.glob("*.py")) if not p.stem.startswith("__"))
            files = "one file a family" if folder == "examples" else files
            lines.append(f"| [{folder}](../../{folder}) | {_cell(summary)} | {files} |")
    return "\n".join(lines)


def _nccl_table() -> str:
    rows = nccl_rows.read(ROOT / "benchmarks" / "data" / "nccl_table.jsonl")
    layouts = "DP2", "DP2 optimizer", "DP2 gradients", "DP2 weights", "TP2 SP", "PP2 VPP2", "CP2", "EP2"
    return nccl_rows.report(rows, layouts)


SECTIONS: dict[str, Callable[[], str]] = {
    "recommended": recommended_table,
    "own_layer": _own_layer,
    "own_module": _own_module,
    "own_loop": _own_loop,
    "own_torch_module": _own_torch_module,
    "dpo": partial(_definitions, "dpo", "answer_log_probs", "of_reference", "Preferences", "learn"),
    "reward": partial(_definitions, "reward", "Score", "BradleyTerry", "scored"),
    "plan": _plan,
    "accuracy": _accuracy,
    "families": _families,
    "rules": _rules,
    "command_line": _command_line,
    "plan_json": _plan_json,
    "python_api": _python_api,
    "devices": _devices,
    "map": _map,
    "nccl_table": _nccl_table,
    "ops": ops_page.ops,
    "functions": ops_page.functions,
    "sharded_dims": ops_page.sharded_dims,
    **sections(),
}


def main(update: bool) -> int:
    """Write every generated section anew, or list the pages that are out of date; return the exit status."""
    stale = 0
    for page in pages():
        if (text := written(page)) != page.read_text():
            stale += 1
            print(page.relative_to(ROOT))
            if update:
                page.write_text(text)
    return int(stale > 0 and not update)


if __name__ == "__main__":
    sys.exit(main("--update" in sys.argv[1:]))
