"""What distinguishes two predictions, in words."""

from __future__ import annotations

from .plan import Prediction

ALL_OF_IT = 1.1  # one cause explains a difference, unless it adds this many times as much


def slower(best: Prediction, other: Prediction) -> str:
    """How much slower another layout is, the cause that adds the most and, if that is more than the sum, what saves."""
    ours, theirs = best.breakdown, other.breakdown
    more = {cause: theirs.get(cause, 0.0) - ours.get(cause, 0.0) for cause in {**ours, **theirs}}
    most, least = max(more, key=more.__getitem__), min(more, key=more.__getitem__)
    said = f"{other.step_seconds / best.step_seconds - 1:.1%} slower: {time(more[most])} more of {most}"
    if more[most] > ALL_OF_IT * (other.step_seconds - best.step_seconds):
        said += f", {time(-more[least])} less of {least}"
    return said


def time(seconds: float) -> str:
    """Seconds as one says them."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
