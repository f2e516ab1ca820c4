"""`megaloom evaluate`: the loss of a trained model on each source of data."""

from __future__ import annotations

from pathlib import Path

from attrs import asdict, astuple
from rich.table import Table
from rich.text import Text

from megaloom.runtime.cli.command_groups import EvaluateOptions
from megaloom.runtime.cli.printing import print_on_first_rank
from megaloom.runtime.training.evaluated_text import ALL
from megaloom.runtime.training.evaluation import RunEvaluation, evaluate_run


def run_evaluate(folder: Path, options: EvaluateOptions) -> None:
    """Evaluate the last checkpoint of a run, and print a table."""
    given = asdict(options, filter=lambda field, value: field.name not in ("data", "steps_from"))
    evaluation = evaluate_run(folder, options.data, **given, steps=options.steps_from)
    what = "all parts" if evaluation.part == ALL else f"{evaluation.part} part"
    what += f" by --split {evaluation.split}" if evaluation.split and evaluation.part != ALL else ""
    title = Text(f"{folder}, step {evaluation.step}, {what}\n")
    print_on_first_rank(*evaluation.notes, title, evaluation_table(evaluation))


def evaluation_table(evaluation: RunEvaluation) -> Table:
    """Return loss, tokens, perplexity or scores, terms of the loss, and the report of an own step, of each source."""
    scored = any(source.result.scores for source in evaluation.losses)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("data")
    names = ("accuracy", "macro F1", evaluation.counted)
    results = [source.result for source in evaluation.losses]
    reported = tuple(dict.fromkeys(name for result in results for name in result.report))
    terms = tuple(dict.fromkeys(name for result in results for name in result.terms))
    for name in ("loss", "unit", *(names if scored else ("perplexity", "tokens")), *map(Text, (*terms, *reported))):
        table.add_column(name, justify="right")
    for source in evaluation.losses:
        result = source.result
        perplexity = "" if result.perplexity is None else f"{result.perplexity:.3f}"
        scores = [f"{x:.4f}" for x in astuple(result.scores)] if result.scores else [perplexity]
        report = [f"{result.terms[name]:.4f}" for name in terms] + [f"{result.report[name]:.4g}" for name in reported]
        table.add_row(Text(source.name), f"{result.loss:.4f}", source.unit, *scores, f"{result.tokens:,}", *report)
    return table
