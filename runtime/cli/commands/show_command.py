"""`megaloom show`: print a model as a tree, draw it, or list its placements."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from megaloom.dsl.catalog import find
from megaloom.dsl.facts.positions import longest
from megaloom.dsl.graph import graph
from megaloom.dsl.settings.arguments import Arguments
from megaloom.dsl.show import html as page
from megaloom.dsl.show.outline import outline
from megaloom.dsl.show.placements import placement_table
from megaloom.dsl.show.table import report
from megaloom.dsl.show.tree import guides_for
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Precision
from megaloom.runtime.cli.printing import print_on_first_rank

LONGEST_SEQ = 4096


def run_show(
    model: str,
    arguments: Arguments,
    seq: int | None,
    batch: int,
    source: int | None,
    precision: Precision,
    svg: Path | None,
    html: Path | None,
) -> None:
    """Print the table of a model, and write its drawing and page if asked to."""
    declared, _ = find(model, arguments)
    tokens = min(LONGEST_SEQ, longest(graph(declared)).get("seq", LONGEST_SEQ)) if seq is None else seq
    model_outline = outline(declared, batch=batch, seq=tokens, source=source, element=precision.nbytes)
    if svg or html:
        page.save_files(model_outline, precision, svg, html)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    wrote = (f"wrote {path}" for path in (svg, html) if path)
    print_on_first_rank(report(model_outline, precision, guides_for(sys.stdout.encoding), width), *wrote)


def run_placements(model: str, arguments: Arguments, axes: Mapping[str, int]) -> None:
    """Print the transitions of a model whose tensors lie over these axes."""
    declared, _ = find(model, arguments)
    print_on_first_rank(placement_table(graph(declared), Layout(**axes).split))
