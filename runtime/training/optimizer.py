"""What makes the parameters move: DDP, the optimizer, the learning rate."""

from __future__ import annotations

from functools import partial
from typing import Any

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

from megaloom.planner.contract.choices import Overlap
from megaloom.runtime.megatron.process_groups import ProcessGroups

from .model_chunk import ModelChunk
from .recipe import Recipe


def replicate(
    stages: list[ModelChunk], config: TransformerConfig, groups: ProcessGroups
) -> list[DistributedDataParallel]:
    """The stages with their gradients in contiguous fp32 buffers, added up over the data-parallel ranks in pieces.

    Where that overlaps, a piece is on its way as soon as the last micro-batch has gone back through it. `config` learns
    of it: before that micro-batch the schedules hold the exchange back. Where the gathering of weights does, each
    module waits for its own before it runs, be it in training, in evaluation, or the first time after a load.
    """
    x, several = groups.layout, groups.layout.dp * groups.layout.cp > 1
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=x.distributed_optimizer,
        overlap_grad_reduce=several and x.has_overlap(Overlap.GRADIENTS),
        overlap_param_gather=several and x.has_overlap(Overlap.WEIGHTS),
        align_param_gather=x.vpp > 1,
    )
    chunks = [DistributedDataParallel(config, ddp, s, disable_bucketing=i > 0) for i, s in enumerate(stages)]
    for stage, chunk in zip(stages, chunks, strict=True):
        if chunk.use_forward_hook:
            for _, module in stage.node_modules():
                module.register_forward_pre_hook(partial(_wait, chunk))
    if ddp.overlap_param_gather and ddp.align_param_gather:  # schedules ask for a chunk while they run the one before
        config.param_sync_func = [chunk.start_param_sync for chunk in chunks]
    held = [chunk.no_sync for chunk in chunks]
    config.no_sync_func = held if len(held) > 1 else held[0]
    return chunks


def _wait(chunk: DistributedDataParallel, module: nn.Module, _: Any) -> None:
    """Wait until all weights of a node are here: those too that it reads without calling the modules that hold them,
    before which alone megatron-core waits."""
    for group in {id(g): g for p in module.parameters() if (g := chunk.param_to_bucket_group.get(p))}.values():
        group.finish_param_sync(skip_next_bucket_dispatch=chunk.ddp_config.align_param_gather)


def optimizer(
    recipe: Recipe, chunks: list[DistributedDataParallel], config: TransformerConfig, groups: ProcessGroups
) -> MegatronOptimizer:
    """AdamW on fp32 master weights; its state is split over the data-parallel ranks if the layout says so."""
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=recipe.lr,
            min_lr=recipe.min_lr,
            weight_decay=recipe.weight_decay,
            adam_beta1=recipe.beta1,
            adam_beta2=recipe.beta2,
            adam_eps=recipe.eps,
            clip_grad=recipe.clip_grad,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=groups.layout.distributed_optimizer,
            overlap_param_gather=any(chunk.use_forward_hook for chunk in chunks),
        ),
        chunks,
        # What has one dim, is a bias, or starts constant (a scale of every head) does not decay.
        config_overrides={
            ParamKey(
                name="*.bias", attr="constant", predicate=ParamPredicate("one_dim", lambda p: p.dim() == 1)
            ): ParamGroupOverride(wd_mult=0.0)
        },
        use_gloo_process_groups=False,
    )


def schedule(recipe: Recipe, optim: MegatronOptimizer) -> OptimizerParamScheduler:
    """The learning rate of each step: linear warm-up from 0, then a cosine that is at min_lr when the last is done."""
    return OptimizerParamScheduler(
        optim,
        init_lr=0.0,
        max_lr=recipe.lr,
        min_lr=min(recipe.min_lr, recipe.lr),
        lr_warmup_steps=min(recipe.warmup, recipe.steps - 1),
        lr_decay_steps=recipe.steps,
        lr_decay_style="cosine",
        start_wd=recipe.weight_decay,
        end_wd=recipe.weight_decay,
        wd_incr_steps=recipe.steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
