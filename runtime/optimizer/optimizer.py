"""DDP with its gradient buffers, the optimizer, and the learning-rate schedule, all megatron-core's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    ParamGroupOverride,
    ParamKey,
    ParamPredicate,
    get_megatron_optimizer,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megaloom.planner.contract.choices import GradReduce, Overlap
from megaloom.planner.contract.layout import Layout
from megaloom.runtime.megatron.multi_tensor import use_foreach_kernels
from megaloom.runtime.megatron.optimizer_state import optimizers_of
from megaloom.runtime.megatron.process_groups import ProcessGroups
from megaloom.runtime.modules.model_chunk import ModelChunk

from .parameter_groups import ParameterGroup, group_overrides
from .recipe import Recipe, Schedule
from .sharded_chunk import ShardedChunk
from .weight_update import SharedGradScaler

ENDLESS = 2**62
"""Last step of a schedule that has none."""


TrainedChunk: TypeAlias = DistributedDataParallel | ShardedChunk
"""A model chunk that training runs: it holds gradients, and reduces them over data-parallel ranks."""


def wrap(
    model_chunks: list[ModelChunk], config: TransformerConfig, groups: ProcessGroups, bucket_size: int | None = None
) -> list[TrainedChunk]:
    """Wrap model chunks in DDP, or shard their weights, and tell the schedules when gradients are reduced.

    bucket_size: gradients that DDP reduces at once; None for megatron-core's default.
    """
    if groups.layout.fsdp:
        chunks: list[TrainedChunk] = [ShardedChunk(config, c, groups) for c in model_chunks]
    else:
        chunks = _in_ddp(model_chunks, config, groups, bucket_size)
    no_sync = [chunk.no_sync for chunk in chunks]
    config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return chunks


def _in_ddp(
    model_chunks: list[ModelChunk], config: TransformerConfig, groups: ProcessGroups, bucket_size: int | None
) -> list[TrainedChunk]:
    """Wrap model chunks in DDP, with gradients in contiguous buffers that are reduced bucket by bucket.

    The buffers have the layout's format of gradients, fp32 or bf16. With overlapped reduction, a bucket is reduced as
    soon as the last micro-batch has filled it; `config.no_sync_func` tells the schedules to hold it back before. With
    overlapped weight gathering, each module waits for its own weights before it runs: in training, in evaluation, and
    after a load.
    """
    ddp_config = _ddp_config(groups.layout, bucket_size)
    chunks = [
        DistributedDataParallel(config, ddp_config, c, disable_bucketing=i > 0) for i, c in enumerate(model_chunks)
    ]
    for model_chunk, chunk in zip(model_chunks, chunks, strict=True):
        if chunk.use_forward_hook:
            for _, module in model_chunk.node_modules():
                module.register_forward_pre_hook(partial(_wait_for_weights, chunk))
    if ddp_config.overlap_param_gather and ddp_config.align_param_gather:
        # The schedules start the gather for a chunk while they run the chunk before it.
        config.param_sync_func = [chunk.start_param_sync for chunk in chunks]
    return chunks


def _ddp_config(layout: Layout, bucket_size: int | None) -> DistributedDataParallelConfig:
    replicated = layout.dp * layout.cp > 1
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=layout.grad_reduce is GradReduce.FP32,
        use_distributed_optimizer=layout.distributed_optimizer,
        overlap_grad_reduce=replicated and layout.has_overlap(Overlap.GRADIENTS),
        overlap_param_gather=replicated and layout.has_overlap(Overlap.WEIGHTS),
        align_param_gather=layout.vpp > 1,
        bucket_size=bucket_size,
    )


def _wait_for_weights(chunk: DistributedDataParallel, module: nn.Module, _: Any) -> None:
    """Wait until all weights of a node are gathered.

    megatron-core waits before each module that holds weights. A node may also read weights without calling the modules
    that hold them, so this hook waits for all.
    """
    bucket_groups = {id(g): g for p in module.parameters() if (g := chunk.param_to_bucket_group.get(p))}
    for group in bucket_groups.values():
        group.finish_param_sync(skip_next_bucket_dispatch=chunk.ddp_config.align_param_gather)


def gather_weights(chunks: Sequence[TrainedChunk]) -> None:
    """Gather the weights that the distributed optimizer has updated, if a gather is pending. Every rank calls it."""
    for chunk in chunks:
        if chunk.ddp_config.use_distributed_optimizer:
            chunk.start_param_sync(force_sync=True)


def make_optimizer(
    recipe: Recipe,
    chunks: Sequence[TrainedChunk],
    config: TransformerConfig,
    groups: ProcessGroups,
    parameter_groups: Sequence[ParameterGroup] = (),
) -> MegatronOptimizer:
    """Return AdamW on fp32 master weights, its state sharded over data-parallel ranks if the layout says so."""
    use_foreach_kernels()
    sharded = groups.layout.fsdp  # then the shards are fp32, so they are master weights
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=recipe.peak_lr,
            min_lr=recipe.lowest_lr,
            weight_decay=recipe.weight_decay,
            adam_beta1=recipe.beta1,
            adam_beta2=recipe.beta2,
            adam_eps=recipe.eps,
            clip_grad=recipe.clip_grad,
            bf16=config.bf16 and not sharded,
            fp16=config.fp16,
            params_dtype=torch.float32 if sharded else config.params_dtype,
            use_distributed_optimizer=groups.layout.distributed_optimizer,
            overlap_param_gather=any(chunk.use_forward_hook for chunk in chunks),
        ),
        chunks,
        # No weight decay for one-dimensional parameters, biases, and weights that start constant (per-head scales).
        config_overrides={
            ParamKey(
                name="*.bias", attr="constant", predicate=ParamPredicate("one_dim", lambda p: p.dim() == 1)
            ): ParamGroupOverride(wd_mult=0.0),
            **group_overrides(parameter_groups, recipe),
        },
        use_gloo_process_groups=False,
    )
    fuse_steps(optimizer)
    if sharded:
        for one in optimizers_of(optimizer):  # the squares of all ranks are added, of dp too
            one.grad_stats_parallel_group = dist.group.WORLD
    return optimizer


def fuse_steps(optimizer: MegatronOptimizer) -> None:
    """Let torch's AdamW, which megatron-core takes where it finds no Transformer Engine, step in one fused kernel."""
    for one in optimizers_of(optimizer):
        if isinstance(one.optimizer, torch.optim.AdamW):
            for group in one.optimizer.param_groups:
                group["fused"] = True


def share_grad_scaler(recipe: Recipe, optimizer: MegatronOptimizer, tokens: int) -> SharedGradScaler:
    """Give all parts of an fp16 optimizer one loss scale, and return it. tokens: of a global batch."""
    scaler = SharedGradScaler(recipe, tokens)
    for one in optimizers_of(optimizer):
        one.grad_scaler = scaler
    return scaler


def make_scheduler(recipe: Recipe, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Return the learning-rate schedule: linear warm-up from 0, then the recipe's schedule down to its lowest."""
    end = ENDLESS if recipe.schedule_end is None else recipe.schedule_end
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=recipe.peak_lr,
        min_lr=recipe.lowest_lr,
        lr_warmup_steps=min(recipe.warmup, end - 1),
        lr_decay_steps=end,
        lr_decay_style="WSD" if recipe.schedule is Schedule.WSD else recipe.schedule.value,
        wsd_decay_steps=max(1, end // 10) if recipe.final_decay_steps is None else recipe.final_decay_steps,
        lr_wsd_decay_style=recipe.final_decay.value.replace("-", "_"),
        start_wd=recipe.weight_decay,
        end_wd=recipe.weight_decay,
        wd_incr_steps=end,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
