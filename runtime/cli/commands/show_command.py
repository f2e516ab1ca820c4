"""`megaloom show`: print a model as a tree, draw it, or list its placements."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping

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
from megaloom.runtime.cli.command_groups import ShowOptions
from megaloom.runtime.cli.printing import print_on_first_rank

LONGEST_SEQ = 4096


def run_show(model: str, arguments: Arguments, options: ShowOptions) -> None:
    """Print the table of a model, and write its drawing and page if asked to."""
    declared, _ = find(model, arguments)
    precision, svg, html = options.precision, options.svg, options.html
    longest_seq = min(LONGEST_SEQ, longest(graph(declared)).get("seq", LONGEST_SEQ))
    seq = longest_seq if options.seq is None else options.seq
    element = precision.nbytes
    model_outline = outline(declared, batch=options.batch, seq=seq, source=options.source, element=element)
    if svg or html:
        page.save_files(model_outline, precision, svg, html)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    wrote = (f"wrote {path}" for path in (svg, html) if path)
    print_on_first_rank(report(model_outline, precision, guides_for(sys.stdout.encoding), width), *wrote)


def run_placements(model: str, arguments: Arguments, axes: Mapping[str, int]) -> None:
    """Print the transitions of a model whose tensors lie over these axes."""
    declared, _ = find(model, arguments)
    print_on_first_rank(placement_table(graph(declared), Layout(**axes).split))
