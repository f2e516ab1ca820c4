"""Megatron-Bridge: overrides of a recipe by its names, `model.*`, `train.*`, `ddp.*`, from YAML or a command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megaloom.planner.runs.settings.flag_words import SettingsRun, flag_words, renamed
from megaloom.planner.runs.settings.interpolation import Interpolation
from megaloom.planner.runs.settings.tree import Setting, Tree, found, leaves, setting_at
from megaloom.planner.runs.words import Word

_SECTIONS = (
    "train",
    "ddp",
    "optimizer",
    "scheduler",
    "dataset",
    "checkpoint",
    "tokenizer",
    "mixed_precision",
    "logger",
)
_RENAMED = {
    "seq_length": "seq-length",
    "num_moe_experts": "num-experts",
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers",
    "gated_linear_unit": "swiglu",
}
_PRECISIONS = {"bf16_mixed": "--bf16", "16_mixed": "--fp16", "bf16": "--bf16", "fp16": "--fp16"}


def is_bridge(tree: Tree | None) -> bool:
    """Return True for settings with a model and a section of Megatron-Bridge's recipes."""
    model = found(tree, "model")
    return isinstance(model, Mapping) and any(isinstance(found(tree, s), Mapping) for s in _SECTIONS)


def bridge_run(tree: Tree, environment: Mapping[str, str]) -> SettingsRun:
    """Return the overrides as a command line. What the recipe sets is not in it."""
    inserted = Interpolation(tree, environment)
    resolved = inserted.resolved(tree)
    return SettingsRun(framework="Megatron-Bridge", words=tuple(_words(resolved)), assumed=tuple(inserted.assumed))


def _words(tree: Tree | None) -> Iterator[Word]:
    for key, value in leaves(found(tree, "model")):
        yield from flag_words(_RENAMED.get(key, key), value)
    for section, keys in (
        ("train", ("micro_batch_size", "global_batch_size", "train_iters", "manual_gc")),
        ("ddp", ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "average_in_collective")),
    ):
        for key in keys:
            yield from flag_words(key, found(tree, f"{section}.{key}"))
    if found(tree, "model.seq_length") is None:
        yield from renamed(
            "--seq-length", setting_at(tree, "dataset.sequence_length") or setting_at(tree, "dataset.seq_length")
        )
    precision = found(tree, "mixed_precision")
    if isinstance(precision, Setting) and precision.kind != "null":
        yield Word(_PRECISIONS.get(precision.text, f"--{precision.text}"), precision.word.origin)
