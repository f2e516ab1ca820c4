"""A model as a self-contained web page: its drawing and, next to it, its table."""

from __future__ import annotations

from html import escape
from pathlib import Path

from megaloom.dsl.errors import UserError

from .items import Group
from .outline import Outline
from .svg import MONO, SANS, svg
from .table import COLUMN_TITLES, footer
from .tree import TreeRow, tree_rows

# Colours and fonts of all documents.
SHARED_STYLE = f"""
:root {{ color-scheme: light dark; --ink: #1f2328; --dim: #57606a; --rule: #d0d7de; --paper: #ffffff }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e6edf3; --dim: #9198a1; --rule: #30363d; --paper: #0d1117 }}
}}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 13px/1.5 {SANS} }}
"""
MODEL_STYLE = f"""main {{ display: flex; flex-wrap: wrap; align-items: flex-start }}
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
INDENT_EM = 1.4  # per level of the tree


def page(o: Outline, precision: str) -> str:
    """Return the text of the page."""
    names = "".join(f"<th>{escape(name.strip())}</th>" for name in COLUMN_TITLES)
    rows = "\n".join(map(_row, tree_rows(o)))
    body = f"""<main>
{svg(o)}<section>
<table>
<thead><tr>{names}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
<p>{escape(footer(o, precision))}</p>
</section>
</main>
"""
    return document(o.model.name, MODEL_STYLE, body)


def document(title: str, style: str, body: str) -> str:
    """Return a whole HTML document with the shared style and its own. title: plain text; body: HTML."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{SHARED_STYLE}{style}</style>
</head>
<body>
{body}</body>
</html>
"""


def _row(row: TreeRow) -> str:
    """Return a row of the table. Tooltips show the exact figures."""
    f = row.figures
    exact = ("", f"{f.params:,} parameters", f"{f.forward:,} FLOPs", f"{f.saved:,} elements", f"{f.nbytes:,} bytes")
    repeats = row.item is None or (isinstance(row.item, Group) and row.item.layer is None)
    title = f"<b>{escape(row.title)}</b>" if repeats else escape(row.title)
    cells = (f'<td title="{full}">{escape(cell)}</td>' for full, cell in zip(exact, row.cells, strict=True))
    return f'<tr><td style="padding-left: {INDENT_EM * row.depth:g}em">{title}</td>{"".join(cells)}</tr>'


def save_files(o: Outline, precision: str, svg_drawing: Path | None, html_page: Path | None) -> None:
    """Write the drawing and the page to the given paths. Raise UserError if a file cannot be written."""
    for path, text in ((svg_drawing, svg(o)), (html_page, page(o, precision))):
        try:
            if path:
                path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}\ngive a file in a directory that exists") from None
