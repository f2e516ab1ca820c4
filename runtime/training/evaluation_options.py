"""Options of a run for evaluations and saves at the ends of epochs, and for the micro-batch of evaluations."""

from __future__ import annotations

from attrs import Attribute, field, frozen

from megaloom.dsl.errors import UserError


def _at_least_1(owner: object, attribute: Attribute[int | None], value: int | None) -> None:
    """Raise UserError for a number of sequences below 1."""
    if value is not None and value < 1:
        raise UserError(f"--{attribute.name.replace('_', '-')} must be at least 1, got {value}")


@frozen(kw_only=True)
class EvaluationOptions:
    """Evaluations and saves at the ends of epochs, beside those by steps, and the micro-batch of evaluations."""

    evaluate_every_epoch: bool = False
    """Evaluate at the end of each epoch too, a pass over the training text."""
    save_every_epoch: bool = False
    """Save at the end of each epoch too, as step-000200-epoch-1."""
    evaluate_micro_batch: int | None = field(default=None, validator=_at_least_1)
    """Sequences per micro-batch of evaluations. [default: that of training]"""


DEFAULT_EVALUATION = EvaluationOptions()
