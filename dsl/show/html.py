"""A model as a web page: its drawing, and beside it its lines as a table. One file, which loads nothing."""

from __future__ import annotations

from html import escape
from pathlib import Path

from megaloom.dsl.errors import UserError

from .items import Group
from .outline import Outline
from .svg import MONO, SANS, svg
from .table import HEAD, foot
from .tree import Line, lines

# What all pages share: colours and fonts.
LOOK = f"""
:root {{ color-scheme: light dark; --ink: #1f2328; --dim: #57606a; --rule: #d0d7de; --paper: #ffffff }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e6edf3; --dim: #9198a1; --rule: #30363d; --paper: #0d1117 }}
}}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 13px/1.5 {SANS} }}
"""
STYLE = f"""{LOOK}main {{ display: flex; flex-wrap: wrap; align-items: flex-start }}
svg {{ max-width: 100%; height: auto; flex: none }}
section {{ flex: 1 1 680px; min-width: 0; padding: 62px 28px 28px; box-sizing: border-box; overflow-x: auto }}
table {{ border-collapse: collapse }}
th {{ color: var(--dim); font-weight: normal; text-align: right; vertical-align: bottom; white-space: pre-line }}
th:nth-child(-n + 2) {{ text-align: left }}
td, th {{ padding: 3px 18px 3px 0; vertical-align: top; border-bottom: 1px solid var(--rule) }}
td:first-child {{ max-width: 34em }}
td:nth-child(2) {{ color: var(--dim); font: 12px {MONO}; white-space: nowrap }}
td:nth-child(n + 3) {{ text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }}
p {{ color: var(--dim); white-space: pre-line }}
"""
INDENT = 1.4  # em a level


def page(o: Outline, precision: str) -> str:
    """The text of the file."""
    names = "".join(f"<th>{escape(name.strip())}</th>" for name in HEAD)
    rows = "\n".join(map(_row, lines(o)))
    name = escape(o.model.name)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
{svg(o)}<section>
<table>
<thead><tr>{names}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
<p>{escape(foot(o, precision))}</p>
</section>
</main>
</body>
</html>
"""


def _row(line: Line) -> str:
    """A line of the table; where the mouse rests on a figure, all its digits."""
    f = line.figures
    exact = ("", f"{f.params:,} parameters", f"{f.forward:,} FLOPs", f"{f.saved:,} elements", f"{f.nbytes:,} bytes")
    repeats = line.item is None or (isinstance(line.item, Group) and line.item.layer is None)
    said = f"<b>{escape(line.title)}</b>" if repeats else escape(line.title)
    cells = (f'<td title="{full}">{escape(cell)}</td>' for full, cell in zip(exact, line.cells, strict=True))
    return f'<tr><td style="padding-left: {INDENT * line.depth:g}em">{said}</td>{"".join(cells)}</tr>'


def save(o: Outline, precision: str, drawing: Path | None, whole: Path | None) -> None:
    """Write the drawing and the page to the files that are given. Raises UserError where that cannot be."""
    for path, text in ((drawing, svg(o)), (whole, page(o, precision))):
        try:
            if path:
                path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}\ngive a file in a directory that exists") from None
