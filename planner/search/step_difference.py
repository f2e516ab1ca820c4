"""Differences of two predictions as text, and bytes and seconds as text."""

from __future__ import annotations

from megaloom.planner.contract.devices import GiB
from megaloom.planner.contract.plans import Prediction
from megaloom.planner.cost.measured_memory import held_bytes

TIE_SHARE = 0.0005  # share of a step; a smaller difference counts as none
EXPLAINS = 1.1  # one cause explains a difference if it adds no more than this multiple of it


def difference_text(best: Prediction, other: Prediction) -> str:
    """Return by how much another prediction is slower, and why: `5.0% slower: backward +375 ms, recompute −250 ms`.

    The first cause adds the most time. The second saves the most; it is given if the first adds more than the whole
    difference. Of a prediction that is equally fast, return how much more memory it needs.
    """
    if other.step_seconds - best.step_seconds < TIE_SHARE * best.step_seconds:
        more = peak_nbytes(other) - peak_nbytes(best)
        needs_more = more > TIE_SHARE * peak_nbytes(best)
        return f"equally fast, with {format_nbytes(more)} more memory" if needs_more else "equally fast, not simpler"
    seconds = cause_differences(best, other)
    most, least = max(seconds, key=seconds.__getitem__), min(seconds, key=seconds.__getitem__)
    text = f"{other.step_seconds / best.step_seconds - 1:.1%} slower: {most} +{format_seconds(seconds[most])}"
    if seconds[most] > EXPLAINS * (other.step_seconds - best.step_seconds):
        text += f", {least} −{format_seconds(-seconds[least])}"
    return text


def cause_differences(a: Prediction, b: Prediction) -> dict[str, float]:
    """Return the seconds of a step that b takes more than a, by cause; negative where it takes less."""
    ours, theirs = a.breakdown, b.breakdown
    return {cause: theirs.get(cause, 0.0) - ours.get(cause, 0.0) for cause in {**ours, **theirs}}


def peak_nbytes(of: Prediction, kind: str = "device") -> int:
    """Return the bytes of the pipeline rank with the most memory, as `kind` measures them: see `held_bytes`."""
    return max(held_bytes(held, kind) for held in of.nbytes)


def format_nbytes(nbytes: int) -> str:
    """Return bytes as text, in GiB or MiB."""
    return f"{nbytes / GiB:.1f} GiB" if nbytes >= GiB else f"{nbytes / 2**20:.0f} MiB"


def format_seconds(seconds: float) -> str:
    """Return seconds as text, in s or ms."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
