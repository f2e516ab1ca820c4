"""Gradients as megatron-core's package `distributed` reduces them, beside transformers and AdamW on one process.

A small Mixtral with tied embeddings trains on Python's own source text. A row is an option of DistributedDataParallel,
or a kind of parallelism whose gradients finalize_model_grads completes. Loss and gradient norm of each step must be
those of one process: an error in any gradient changes the norm of its step and the loss of the next one.

    python -m megaloom.examples.scripts.gradient_reduction    # exit code 1 if a number differs
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from attrs import evolve, frozen
from transformers import MixtralConfig, MixtralForCausalLM, logging

from megaloom.dsl.catalog import find
from megaloom.dsl.errors import UserError
from megaloom.examples.scripts import plain_torch
from megaloom.planner import Plan, Precision, Workload, cluster, plan
from megaloom.runtime import Engine, Recipe, read_weights, shard
from megaloom.runtime.launch import launcher

BATCH, SEQ, STEPS = 8, 32, 4
RECIPE = Recipe(steps=STEPS, lr=1e-3, warmup=0, schedule="constant")
ALL_REDUCE = {"dp": 2, "overlaps": (), "shard": "none"}
OVERLAPPED = {**ALL_REDUCE, "overlaps": ("gradients",)}
DISTRIBUTED = {"dp": 2, "overlaps": ("gradients", "weights"), "shard": "optimizer"}


@frozen
class Row:
    """Options of a run, and the relative difference from fp32 that its precision allows."""

    layout: dict[str, Any]
    bucket: int | None = None
    precision: Precision = Precision.FP32
    tolerance: float = 1e-5


ROWS = {
    "one synchronous all-reduce": Row(ALL_REDUCE),
    "overlap_grad_reduce": Row(OVERLAPPED, bucket=4_000),
    "disable_bucketing": Row(OVERLAPPED),
    "use_distributed_optimizer": Row(DISTRIBUTED, bucket=4_000),
    "no_sync, 4 micro-batches": Row({**ALL_REDUCE, "micro_batch": 1}),
    "bf16, gradients in fp32": Row(DISTRIBUTED, precision=Precision.BF16, tolerance=0.03),
    "norms, sequence parallel": Row({"tp": 2, "sequence_parallel": True}),
    "embeddings of two stages": Row({"pp": 2, "vpp": 1}),
    "experts, expert parallel": Row({"dp": 2, "ep": 2}),
}
RESHARDED, NAN = "state_dict, dp2 to tp2", "check_for_nan_in_grad"


def make_model(folder: Path) -> Any:
    """Write a Mixtral with random weights and tied embeddings into a folder, and return it."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, tie_word_embeddings=True, sliding_window=None))
    model.save_pretrained(folder)
    return model


def planned(folder: Path, row: Row) -> Plan:
    """Return a plan of the folder's model for two ranks of this machine."""
    model, ref = find(str(folder))
    workload = Workload(seq=SEQ, batch=BATCH, precision=row.precision)
    return plan(model, cluster("2xCPU"), workload, ref=ref, fixed=row.layout).best


def trained(engine: Engine, last: int = STEPS) -> list[plain_torch.Step]:
    """Train to a step on this rank's rows of the global batches. Return loss and gradient norm of each step."""
    data = plain_torch.batches(last, BATCH, SEQ)[engine.done :]
    mine = (plain_torch.share(batch, engine.groups.dp_rank, engine.plan.layout.dp) for batch in data)
    return [(result.loss, result.grad_norm) for result in map(engine.step, mine)]


def steps(made: Plan, folder: Path, recipe: Recipe) -> tuple[list[plain_torch.Step], str]:
    """Train on this rank. Return loss and gradient norm of each step, and what megatron-core's DDP was told."""
    model = find(made.model)[0]
    engine = shard(model, made, recipe, weights=read_weights(folder, model))
    ddp = engine.state.chunks[0]
    buckets = sum(len(group.buckets) for group in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups))
    names = ("overlap_grad_reduce", "use_distributed_optimizer", "grad_reduce_in_fp32")
    flags = "  ".join(f"{getattr(ddp.ddp_config, name)!s:5}" for name in names)
    return trained(engine), f"{flags}  {buckets:7}"


def half(made: Plan, folder: Path, weights: Path | None) -> list[plain_torch.Step]:
    """Train half of the steps on this rank and save; or, without weights, load what was saved and train the rest."""
    model = find(made.model)[0]
    engine = shard(model, made, RECIPE, weights=read_weights(weights, model) if weights else None)
    if weights is None:
        engine.load(folder / "run")
        return trained(engine)
    found = trained(engine, STEPS // 2)
    engine.save(folder / "run")
    return found


def resharded(folder: Path) -> list[plain_torch.Step]:
    """Return the steps of a run that goes on under another layout."""
    before, after = (planned(folder, Row(layout)) for layout in (DISTRIBUTED, {"tp": 2}))
    first = launcher.run(half, (before, folder, folder), 2)[0]
    return [*first, *launcher.run(half, (after, folder, None), 2)[0]]


def nan_is_refused(folder: Path) -> bool:
    """Print and return whether a run that diverges is ended at its first gradient that is not finite."""
    row = Row(ALL_REDUCE)
    try:
        launcher.run(steps, (planned(folder, row), folder, evolve(RECIPE, lr=1e3)), 2)
    except UserError as error:
        print(f"{NAN:27}{str(error).partition(chr(10))[0]}")
        return "not finite" in str(error)
    print(f"{NAN:27}nothing was refused")
    return False


def main(*names: str) -> bool:
    """Train with each option, or with those of these names, and return whether all agree with one process."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        expected = plain_torch.train(make_model(folder), plain_torch.batches(STEPS, BATCH, SEQ), RECIPE)
        wanted, agree = names or (*ROWS, RESHARDED, NAN), []
        print(f"{'':27}overlap  distributed  fp32   buckets  last loss  last norm  difference")
        print(f"{'transformers, AdamW':27}{'':38}{expected[-1][0]:9.5f}  {expected[-1][1]:9.5f}")
        for name in wanted:
            if name == NAN:
                agree.append(nan_is_refused(folder))
                continue
            row, told = ROWS.get(name, Row({})), ""
            if name == RESHARDED:
                found = resharded(folder)
            else:
                recipe = evolve(RECIPE, ddp_bucket_size=row.bucket)
                found, told = launcher.run(steps, (planned(folder, row), folder, recipe), 2)[0]
            difference = plain_torch.differ(found, expected)
            print(f"{name:27}{told:38}{found[-1][0]:9.5f}  {found[-1][1]:9.5f}  {difference:.1e}")
            agree.append(difference < row.tolerance)
    return all(agree)


if __name__ == "__main__":
    sys.exit(0 if main(*sys.argv[1:]) else 1)
