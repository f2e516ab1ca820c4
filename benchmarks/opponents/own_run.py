"""A decoder trained by megaloom with the layout of a task. Its arguments: a `Task`, and `torch`, `te` or `te-fp8`."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.opponents.task import STEPS, Result, Task, timed
from benchmarks.opponents.turns import Turns
from benchmarks.timed_steps import stepper
from megaloom.dsl import (
    Attention,
    Dim,
    Embed,
    Model,
    MoE,
    NextToken,
    RMSNorm,
    SwiGLU,
    Unembed,
    ids,
    model,
    params,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.catalog import find
from megaloom.planner import Plan, Precision, Workload, cluster, plan
from megaloom.planner.contract.workload import Backend
from megaloom.runtime.launch import launcher
from megaloom.runtime.megatron import device
from megaloom.runtime.training.chosen_backend import with_backend

GiB = 2**30


def decoder(text: str) -> Model:
    """Return the model of a task, given as `Task.text`."""
    task = Task.of(text)
    v, d = Dim("vocab", task.vocab), Dim("embed", task.hidden)
    norm = RMSNorm(over="head_dim") if task.qk_norm else None
    attention = Attention(heads=task.heads, kv_heads=task.kv_heads, head_dim=task.head_size, rope=500_000, qk_norm=norm)
    feed_forward = SwiGLU(task.ffn)
    if task.experts:
        feed_forward = MoE(feed_forward, task.experts, task.top_k, balance=0.001)
    block = residual(RMSNorm(), attention) >> residual(RMSNorm(), feed_forward)
    x = ids() >> Embed(weight("wte", v, d)) >> repeat(task.layers, block) >> RMSNorm()
    return model("decoder", x >> Unembed(weight("head", v, d)) >> NextToken())


def trained(it: Plan) -> tuple[tuple[float, ...], float, int]:
    """Return for a rank the milliseconds of a step in each turn, time.time() after the first step, and peak bytes."""
    step_ms, first_step_at = timed(stepper(it, STEPS), device.current(), Turns.given())
    return step_ms, first_step_at, device.peak_memory()


def main() -> None:
    task, (backend, *narrow) = Task.given(), sys.argv[2].split("-")
    declared, ref = find(f"{Path(__file__).resolve()}:decoder", {"text": task.text})
    gpu = device.gpu_count()
    kind = device.local_cluster().partition("x")[2]
    fixed = {axis: getattr(task, axis) for axis in ("tp", "cp", "ep", "dp", "micro_batch")}
    fixed |= {"pp": 1, "sequence_parallel": task.tp > 1, "recompute": "none"}
    precision = Precision.FP8 if narrow else Precision.BF16 if gpu else Precision.FP32
    work = Workload(seq=task.seq, batch=task.batch, precision=precision)
    it = plan(declared, cluster(f"{task.world}x{kind}"), work, ref=ref, fixed=fixed, headroom=0.0).best
    ranks = launcher.run(trained, (with_backend(it, Backend(backend)),), it.layout)
    step_ms, first_step_at, _ = ranks[0]
    gib = max(nbytes for *_, nbytes in ranks) / GiB if gpu else 0.0
    print(Result(step_ms, first_step_at, gib, params(declared)).line, flush=True)
    print(f"planned {1e3 * it.predicted.step_seconds:.1f} ms, {it.layout}", flush=True)


if __name__ == "__main__":
    main()
