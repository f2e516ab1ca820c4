"""A second opinion as a web page: the run beside the best layout, by layout, prediction, time and memory."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from megaloom.dsl.show.html import document
from megaloom.planner.contract.plans import Plan
from megaloom.planner.report.charts import breakdown_html, memory_bars, table_html
from megaloom.planner.report.html import page_style
from megaloom.planner.report.tables import layout_table, prediction_table
from megaloom.planner.report.text import breakdown_title

from .opinion import Opinion
from .text import opinion_text

OWN_COLUMN, BEST_COLUMN, CHANGED_COLUMN, ADVISED_COLUMN = (
    "this run",
    "fastest",
    "with these changes",
    "advised",
)


def opinion_page(opinion: Opinion) -> str:
    """Return the text of the page. Without a prediction it has only what was read and the rules that are broken."""
    title = f"{opinion.run.path}: a second opinion"
    plans = _plans(opinion)
    body = f"<h1>{escape(title)}</h1>\n<p>{escape(str(opinion.cluster))}</p>\n{''.join(_beside(plans))}"
    said = f"<h2>In words</h2>\n<pre>{escape(opinion_text(opinion))}</pre>\n"
    return document(title, page_style(), f"<main>\n{body}{said}</main>")


def _plans(opinion: Opinion) -> dict[str, Plan]:
    """Return the plans to show by their names: of several with one layout, the last."""
    found = {
        OWN_COLUMN: opinion.plan,
        CHANGED_COLUMN: opinion.together,
        ADVISED_COLUMN: opinion.advised,
        BEST_COLUMN: opinion.best,
    }
    plans = {name: plan for name, plan in found.items() if plan is not None}
    last = {plan.layout: name for name, plan in plans.items() if name != OWN_COLUMN}
    return {name: plan for name, plan in plans.items() if name in (OWN_COLUMN, *last.values())}


def _beside(plans: dict[str, Plan]) -> Iterator[str]:
    """Yield tables of all plans, then their step time and memory in columns."""
    if not plans:
        return
    names = tuple(plans)
    yield f"<h2>Layout</h2>\n{table_html(layout_table(*plans.values(), names=names))}\n"
    yield f"<h2>Prediction</h2>\n{table_html(prediction_table(*plans.values(), names=names))}\n"
    for drawn, title in ((breakdown_html, breakdown_title), (memory_bars, _memory_title)):
        columns = (
            f"<section><h2>{escape(title(plan))}: {escape(name)}</h2>\n{drawn(plan)}</section>"
            for name, plan in plans.items()
        )
        yield f'<div class="columns">{"".join(columns)}</div>\n'


def _memory_title(plan: Plan) -> str:
    return f"Peak memory of {'each pipeline rank' if plan.layout.pp > 1 else 'the device'}"
