"""Measured times of pipeline stages, as values."""

from __future__ import annotations

from attrs import frozen


@frozen
class StageTime:
    """Measured seconds of one micro-batch through a stage, the mean over micro-batches and ranks."""

    stage: int
    forward_seconds: float
    backward_seconds: float
