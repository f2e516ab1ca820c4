"""The plan: a layout, the cut of the graph into stages, and what is predicted of them. A value; JSON on disk."""

from __future__ import annotations

from attrs import frozen

from .cluster import Cluster
from .layout import Layout, Workload


@frozen(kw_only=True)
class Stage:
    """One chunk of the model on one pipeline rank: the nodes [start, stop) of `graph(model)`, in its order."""

    rank: int  # pipeline rank
    chunk: int  # which of the vpp chunks on that rank
    start: int
    stop: int
    forward_seconds: float  # one micro-batch
    backward_seconds: float
    params: int  # elements on one device


@frozen(kw_only=True)
class Prediction:
    """What one optimizer step is predicted to take; the parts of `breakdown` add up to `step_seconds`."""

    step_seconds: float
    tokens_per_second_per_device: float
    flops_per_second_per_device: float  # model FLOPs (no recompute, causal attention counted half)
    mfu: float
    bubble: float  # share of the step that a pipeline rank waits
    breakdown: dict[str, float]  # seconds by cause
    nbytes: tuple[dict[str, int], ...]  # for each pipeline rank, peak memory by what holds it


@frozen(kw_only=True)
class Plan:
    """The only thing the runtime needs. `stages` are in model order: stage i is chunk i // pp of rank i % pp."""

    version: int
    model: str  # where to find it: "megaloom.examples.gpt2:gpt2" or "/path/file.py:name"
    fingerprint: str  # of the model that was planned; the runtime refuses another
    cluster: Cluster
    workload: Workload
    layout: Layout
    stages: tuple[Stage, ...]
    predicted: Prediction
    reasons: tuple[str, ...]  # why this layout, in sentences
