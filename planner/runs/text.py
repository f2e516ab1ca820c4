"""A second opinion as text for a terminal, on about one screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from textwrap import fill

from megaloom.dsl.errors import UserError
from megaloom.dsl.facts.parameters import params
from megaloom.dsl.quoting import printable
from megaloom.planner.contract.plans import Plan
from megaloom.planner.report.interval_sentences import interval_text, overflow_text
from megaloom.planner.report.lint import ALL_RULES
from megaloom.planner.report.units import format_count
from megaloom.planner.rules.rule import Owner
from megaloom.planner.search.reasons import format_nbytes, format_seconds, peak_nbytes
from megaloom.planner.search.simple_first import NEAR_RATIO, contrast

from .iterations import allocated_ratio
from .memory_causes import memory_causes
from .opinion import Opinion
from .run import Edit, Stated, TrainingRun
from .words import Origin

SCREEN_WIDTH = 110
OF_PLANNER = frozenset(rule.id for rule in ALL_RULES if rule.owner is Owner.PLANNER)  # the program itself has none
CLOSE = 0.01  # share of the step below which a run's layout is called as fast as the best


def opinion_text(opinion: Opinion) -> str:
    """Return the whole opinion."""
    run = opinion.run
    parts = [_head(opinion), *_read(run), *_assumed(run), *_rules(opinion)]
    if opinion.plan is not None:
        parts += [*_predicted(opinion, opinion.plan), *_best(opinion, opinion.plan), *_measured(opinion, opinion.plan)]
    return "\n".join(parts)


def _head(opinion: Opinion) -> str:
    run = opinion.run
    release = f"{run.program} {run.version}".strip()
    defaults = f" (defaults of {run.defaults.removeprefix(f'{run.program} ')})" if run.defaults else ""
    return f"{printable(run.path)}: {printable(release)}{defaults} on {opinion.cluster}\n"


def _read(run: TrainingRun) -> Iterator[str]:
    path = _main_path(run)
    yield f"What was read (in brackets the line of {printable(Path(path).name)})"
    groups = groupby(run.stated, key=lambda fact: fact.group)
    for group, facts in groups:
        texts = [_fact(fact, path) for fact in facts]
        if group == "model":
            texts.insert(0, f"{format_count(params(run.model))} parameters")
        yield _row(group, ", ".join(texts))


def _main_path(run: TrainingRun) -> str:
    """Return the file that states most facts."""
    paths = [fact.origin.path for fact in run.stated if fact.origin is not None]
    return max((run.path, *paths), key=paths.count)


def _fact(fact: Stated, path: str) -> str:
    return f"{fact.name} {fact.value}{_where(fact.origin, path)}"


def _where(origin: Origin | None, path: str) -> str:
    if origin is None:
        return ""
    if origin.path == path:
        return f" [{origin.line_number}]"
    return f" [{'/'.join(Path(origin.path).parts[-2:])}:{origin.line_number}]"  # of another file


def _row(name: str, text: str) -> str:
    return fill(
        text,
        SCREEN_WIDTH,
        initial_indent=f"  {name:<10}",
        subsequent_indent=" " * 12,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _assumed(run: TrainingRun) -> Iterator[str]:
    for name, notes in (("assumed", run.assumed), ("left out", run.notes)):
        for note in notes:
            yield _row(name, printable(note.text + _where(note.origin, _main_path(run))))
            name = ""


def _rules(opinion: Opinion) -> Iterator[str]:
    if not opinion.broken:
        yield "\nRules broken: none"
        return
    wrong = [one for one in opinion.broken if one.rule not in OF_PLANNER]
    limits = [one for one in opinion.broken if one.rule in OF_PLANNER]
    for heading, broken in (
        (f"Rules broken: {len(wrong)}, so this run does not start, or computes something else", wrong),
        ("Not modelled, though the program may run it", limits),
    ):
        if broken:
            yield f"\n{heading}"
            yield from (_row("", f"{one.message} [{one.rule}]; {one.fix}") for one in broken)


def _predicted(opinion: Opinion, plan: Plan) -> Iterator[str]:
    p, device = plan.predicted, plan.cluster.device
    low, high = map(format_seconds, p.interval)
    most = "" if p.nbytes_high is None else f", at most {format_nbytes(int(p.nbytes_high))}"
    fits = "" if opinion.fits else ": it is predicted not to fit"
    yield _row(
        "Predicted".ljust(10),
        f"{format_seconds(p.step_seconds)} a step ({low} to {high}), {p.flops_per_second_per_device / 1e12:.0f} "
        f"TFLOP/s a GPU, MFU {p.mfu:.1%}, bubble {p.bubble:.1%}; "
        f"{format_nbytes(peak_nbytes(p))} of {format_nbytes(device.nbytes)} a GPU{most}{fits}",
    ).replace("  ", "", 1)
    for sentence in filter(None, (interval_text(plan), overflow_text(plan))):
        yield _row("", sentence)


def _best(opinion: Opinion, plan: Plan) -> Iterator[str]:
    best = opinion.best
    if best is None:
        return
    if opinion.fits and opinion.gain < CLOSE:
        faster = "as fast as" if opinion.gain <= 0 else f"within {opinion.gain:.1%} of"
        yield f"Fastest   This layout is {faster} the fastest under the cost model on the same hardware and program."
        return
    yield _row(
        "Fastest".ljust(10),
        f"{format_seconds(best.predicted.step_seconds)} a step, {opinion.gain:.1%} less: {best.layout}; "
        "no layout that fits is more than 0.1 % faster under the cost model, on the same hardware and program",
    ).replace("  ", "", 1)
    yield _row("Advised".ljust(10), _advised(opinion, best)).replace("  ", "", 1)
    yield from _moves(opinion, plan)


def _advised(opinion: Opinion, best: Plan) -> str:
    """Return the recommended layout beside the fastest one, and that changes and patch lead to it."""
    advised = opinion.advised or best
    if advised.layout == best.layout:
        return f"the fastest: no layout within {NEAR_RATIO - 1:.0%} of it is simpler; the changes below lead towards it"
    slower = advised.predicted.step_seconds / best.predicted.step_seconds - 1
    simpler = contrast(advised.layout, best.layout, opinion.cluster)
    why = f"simpler: {simpler}" if simpler else "with more free memory"
    return f"{advised.layout}, {slower:.1%} slower than the fastest, {why}; the changes below lead towards it"


def _moves(opinion: Opinion, plan: Plan) -> Iterator[str]:
    """Yield the changes that matter, with the share of the step that each saves alone, and all together."""
    if opinion.together is None:
        yield "\nNo one, two or three changes save more than 1 % each."
        return
    step, shown = plan.predicted.step_seconds, set[str]()
    yield "\nWhat matters, and the share of the step that it saves alone"
    for change in opinion.changes:
        edits = edits_of(opinion, change.alone)
        shown |= {edit.text for edit in edits if not isinstance(edits, str)}  # type: ignore[union-attr]
        yield _row(_share(change.alone, step), f"{change.group}{_edits_text(edits, opinion.run.path)}")
    edits = edits_of(opinion, opinion.together)
    rest = edits if isinstance(edits, str) else [edit for edit in edits if edit.text not in shown]
    text = f"all of these: {format_seconds(opinion.together.predicted.step_seconds)} a step, {opinion.together.layout}"
    yield _row(_share(opinion.together, step), f"{text}{_edits_text(rest, opinion.run.path, '; also ')}")


def _share(plan: Plan | None, step: float) -> str:
    return "not alone" if plan is None else f"{1 - plan.predicted.step_seconds / step:.1%}"


def _edits_text(edits: Sequence[Edit] | str, path: str, before: str = ": ") -> str:
    if isinstance(edits, str):
        return f" ({edits})"
    return before + ", ".join(edit_text(edit, path) for edit in edits) if edits else ""


def edits_of(opinion: Opinion, plan: Plan | None) -> Sequence[Edit] | str:
    """Return the changes of flags that make the run that of a plan, or why there are none."""
    if plan is None or opinion.run.edits is None:
        return ()
    try:
        return opinion.run.edits(plan)
    except UserError as error:
        return str(error).partition("\n")[0]


def edit_text(edit: Edit, path: str) -> str:
    """Return a change of a flag in words, with the line of the file that has it now."""
    if not edit.old:
        return f"{edit.text} (new)"
    at = edit.old[-1].origin
    where = f"line {at.line_number}" if at.path == path else str(at)
    had = " ".join(word.text for word in edit.old[1:])
    return f"{edit.text} ({where}{f', now {printable(had)}' if had else ''})"


def _measured(opinion: Opinion, plan: Plan) -> Iterator[str]:
    measured = opinion.run.measured
    if measured is None:
        return
    step, (low, high) = plan.predicted.step_seconds, plan.predicted.interval
    more = measured.seconds - step
    inside = "within the interval" if low <= measured.seconds <= high else "outside the interval"
    what = f"{abs(more) / step:.1%} {'more' if more >= 0 else 'less'} than predicted, {inside}"
    yield "\n" + _row("Measured".ljust(10), f"{format_seconds(measured.seconds)} a step, {what}").replace("  ", "", 1)
    for text in measured.left_out:
        yield _row("left out", text)
    ratio = allocated_ratio(measured, plan.layout, plan.predicted.nbytes)
    if ratio is not None and measured.nbytes is not None:
        where = "" if measured.rank is None else f" (rank {measured.rank})"
        told = f"{format_nbytes(measured.nbytes)} of tensors at most{where}, {ratio - 1:+.1%} against the prediction"
        yield _row("memory", told)
        yield from (_row("", text) for text in memory_causes(opinion.run, measured))
    if more > 0 and opinion.causes:
        yield f"  The other {format_seconds(more)} may be any of these, by what each would add:"
        for cause in opinion.causes:
            yield _row("", f"+{format_seconds(cause.seconds)}  {cause.words}")
