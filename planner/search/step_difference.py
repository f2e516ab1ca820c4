"""What distinguishes two predictions, in words."""

from __future__ import annotations

from megaloom.planner.contract.devices import GiB
from megaloom.planner.contract.plans import Prediction
from megaloom.planner.cost.measured_memory import held_bytes

TIE_SHARE = 0.0005  # of a step: what is this little slower is as quick
ALL_OF_IT = 1.1  # one cause explains a difference, unless it adds this many times as much


def difference_text(best: Prediction, other: Prediction) -> str:
    """How much slower another layout is, the cause that adds the most and, if that is more than the sum, what saves.

    Of one that is as quick, the memory that it takes more.
    """
    if other.step_seconds - best.step_seconds < TIE_SHARE * best.step_seconds:
        more = peak_nbytes(other) - peak_nbytes(best)
        return "as quick, but " + (
            f"with {format_nbytes(more)} more memory" if more > TIE_SHARE * peak_nbytes(best) else "no simpler"
        )
    more_of = cause_differences(best, other)
    most, least = max(more_of, key=more_of.__getitem__), min(more_of, key=more_of.__getitem__)
    said = f"{other.step_seconds / best.step_seconds - 1:.1%} slower: {format_seconds(more_of[most])} more of {most}"
    if more_of[most] > ALL_OF_IT * (other.step_seconds - best.step_seconds):
        said += f", {format_seconds(-more_of[least])} less of {least}"
    return said


def cause_differences(a: Prediction, b: Prediction) -> dict[str, float]:
    """Seconds of a step that b takes more than a, by cause; negative where it takes less."""
    ours, theirs = a.breakdown, b.breakdown
    return {cause: theirs.get(cause, 0.0) - ours.get(cause, 0.0) for cause in {**ours, **theirs}}


def peak_nbytes(of: Prediction, kind: str = "device") -> int:
    """Bytes on the fullest pipeline rank, as they are measured: see `measured_memory.held_bytes`."""
    return max(held_bytes(held, kind) for held in of.nbytes)


def format_nbytes(nbytes: int) -> str:
    """Bytes as one says them."""
    return f"{nbytes / GiB:.1f} GiB" if nbytes >= GiB else f"{nbytes / 2**20:.0f} MiB"


def format_seconds(seconds: float) -> str:
    """Seconds as one says them."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
