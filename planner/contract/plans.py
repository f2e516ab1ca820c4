"""The plan: a layout, its stages, and the prediction for them. `plan_json` reads and writes it."""

from __future__ import annotations

from attrs import Factory, frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.low_rank import LoRA
from megaloom.dsl.quoting import shell_word

from .capability import Environment, assumed_environment
from .devices import Cluster
from .layout import Layout
from .workload import Runtime, Workload

# 13: calibration of the cluster, nbytes_high, overflow; 12: reshard, replicas; 11: format of gradients; 10: adapters;
# 9: padding of the vocabulary; 8: interval for within, shard for distributed_optimizer, environment; 7: overlaps;
# 6: runtime; 5: interval; 4: moment of a rank's peak memory.
PLAN_VERSION = 13


class PlanError(UserError):
    """A plan that cannot be used: damaged, of another version, or of another model."""


@frozen(kw_only=True)
class Stage:
    """One model chunk on one pipeline rank: the graph nodes [start, stop) of `graph(model)`, in program order."""

    rank: int  # pipeline rank
    chunk: int  # number of this chunk on its rank, below vpp
    start: int  # number of its first graph node
    stop: int  # number of the graph node after its last one
    forward_seconds: float  # seconds of the forward pass of one micro-batch
    backward_seconds: float  # seconds of the backward pass of one micro-batch, with recompute
    params: int  # elements of its weights on one device


@frozen(kw_only=True)
class Prediction:
    """Predicted time and memory of one optimizer step. The parts of `breakdown` add up to `step_seconds`."""

    step_seconds: float  # seconds of one optimizer step
    interval: tuple[float, float]  # seconds between which nine of ten measured steps lie
    tokens_per_second_per_device: float  # tokens of the batch by second and device
    flops_per_second_per_device: float  # model FLOPs: no recompute, causal attention counted half
    mfu: float  # model FLOPs per second as a share of the device's peak; null where they are unknown
    bubble: float  # share of the step in which the slowest pipeline rank waits, "pipeline bubble" of the breakdown
    breakdown: dict[str, float]  # seconds by cause
    nbytes: tuple[dict[str, int], ...]  # peak memory of each pipeline rank, by holder
    moments: tuple[str, ...]  # the moment of each pipeline rank's peak
    nbytes_high: float | None = None  # bytes that no rank needs more than, in 19 of 20 runs; null before version 13
    overflow: float | None = None  # chance that a rank runs out of memory; null before version 13


@frozen(kw_only=True)
class Plan:
    """Everything that the runtime needs. Stages are in model order: stage i is chunk i // pp of rank i % pp."""

    version: int  # version of this form, see `PLAN_VERSION`
    model: str  # reference of the model: "megaloom.examples.gpt2:gpt2" or "/path/file.py:name(layers=24)"
    fingerprint: str  # hash of the model's graph; the runtime refuses another one
    cluster: Cluster  # devices that the plan is for, and links between them
    workload: Workload  # sequence length, global batch and number format
    layout: Layout  # degrees of parallelism, and other choices of the planner
    stages: tuple[Stage, ...]  # model chunks, in model order
    predicted: Prediction  # time and memory of a step
    reasons: tuple[str, ...]  # why this layout, in sentences
    runtime: Runtime = Runtime.MEGALOOM  # the program that the prediction is for
    environment: Environment = Factory(
        lambda self: assumed_environment(self.runtime, self.cluster.device.name, precision=self.workload.precision),
        takes_self=True,
    )
    """Device, torch and optional kernels for which the costs hold."""
    lora: LoRA | None = None  # adapters that were added to the declared model


@frozen
class Speed:
    """Speed of a step, on each device."""

    tokens_per_second: float
    flops_per_second: float  # model FLOPs: no recompute, causal attention counted half
    mfu: float


def speed_of(plan: Plan, seconds: float, batch: int | None = None) -> Speed:
    """Return the speed of a measured step of `batch` sequences, by default the plan's, in these seconds.

    FLOPs and peak are those of the prediction: the facts of the model, and the datasheet of the cluster's device.
    """
    predicted = plan.predicted
    factor = predicted.step_seconds / seconds * (batch or plan.workload.batch) / plan.workload.batch
    rates = (predicted.tokens_per_second_per_device, predicted.flops_per_second_per_device, predicted.mfu)
    return Speed(*(rate * factor for rate in rates))


def plan_command(plan: Plan) -> str:
    """Return the command that makes a plan for the model, cluster and workload of this one."""
    w, more = plan.workload, "" if plan.runtime is Runtime.MEGALOOM else f" --runtime {plan.runtime}"
    if plan.lora is not None:
        targets = ",".join(plan.lora.targets)
        more += f" --lora-rank {plan.lora.rank} --lora-alpha {plan.lora.alpha:g} --lora-targets {shell_word(targets)}"
    load = f"--seq {w.seq} --batch {w.batch} --precision {w.precision}"
    return f"plan {shell_word(plan.model)} --gpus {shell_word(str(plan.cluster))} {load}{more}"
