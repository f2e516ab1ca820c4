"""Goodput: the share of a long run that makes lasting progress when devices fail, with the best checkpoint interval.

Every failure ends the run, which continues from the last checkpoint. Training waits while a checkpoint is written,
as in our runtime.
"""

from __future__ import annotations

from math import exp, expm1, sqrt

from attrs import frozen

from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.workload import Precision
from megaloom.planner.search.reasons import format_seconds

MANY_DEVICES = 1000  # devices from which on reports include goodput
# Until a failure is found and located: less than 10 minutes on average (MegaScale, arXiv:2402.15627, section 6).
# What follows, reading the last checkpoint, is taken to be as quick as writing it.
RECOVERY_SECONDS = 600.0
STATE_NBYTES = 12  # bytes of an element's master weight and two moments


@frozen(kw_only=True)
class Goodput:
    """Expected losses of a long run, and its checkpoints."""

    share: float  # of the time that makes lasting progress
    failure_seconds: float  # mean time between failures
    checkpoint_nbytes: int
    checkpoint_seconds: float
    every_steps: int  # best number of steps between checkpoints
    every_seconds: float


def goodput(params: int, precision: Precision, cluster: Cluster, step_seconds: float) -> Goodput | None:
    """Return the goodput of a run; None on a cluster without failures.

    A share of 0 means that the cluster fails before the first checkpoint is written.
    """
    if not cluster.failures:
        return None
    mean = 3600 / (cluster.failures * cluster.count)
    nbytes = params * (STATE_NBYTES + (precision.nbytes if precision is not Precision.FP32 else 0))
    save = nbytes / (cluster.storage * cluster.count)
    steps = max(1, round(checkpoint_interval(save, mean) / step_seconds))
    return Goodput(
        share=lasting_share(steps * step_seconds, save, mean, RECOVERY_SECONDS + save),
        failure_seconds=mean,
        checkpoint_nbytes=nbytes,
        checkpoint_seconds=save,
        every_steps=steps,
        every_seconds=steps * step_seconds,
    )


def checkpoint_interval(save: float, mean: float) -> float:
    """Return the best seconds of work between two checkpoints.

    Source: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation
    Computer Systems 22 (2006), equation 37; its first term is J. W. Young's (CACM 17, 1974).
    """
    if save >= 2 * mean:
        return mean
    half = save / (2 * mean)
    return sqrt(2 * save * mean) * (1 + sqrt(half) / 3 + half / 9) - save


def lasting_share(work: float, save: float, mean: float, restart: float) -> float:
    """Return the share of the time whose progress lasts, if a checkpoint is written after every `work` seconds.

    Failures are random, and also happen while a checkpoint is written or read. Source: Daly, equation 20.
    """
    if (work + save + restart) / mean > 500:  # beyond what a float holds
        return 0.0
    return work / (mean * exp(restart / mean) * expm1((work + save) / mean))


def goodput_text(goodput: Goodput) -> str:
    """Return the goodput and the best checkpoint interval as two sentences."""
    size, unit = (1e12, "TB") if goodput.checkpoint_nbytes >= 1e12 else (1e9, "GB")
    return (
        f"{goodput.share:.1%} of the time makes progress that lasts (goodput), with a failure about every "
        f"{_long(goodput.failure_seconds)}. A checkpoint every {goodput.every_steps:,} steps "
        f"({_long(goodput.every_seconds)}) is best; it has {goodput.checkpoint_nbytes / size:.3g} {unit} "
        f"and takes {format_seconds(goodput.checkpoint_seconds)}."
    )


def _long(seconds: float) -> str:
    for size, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} seconds"
