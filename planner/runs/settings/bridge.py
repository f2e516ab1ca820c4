"""Megatron-Bridge: its configuration, `model.*`, `train.*`, `ddp.*`, from YAML, a script or overrides of a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megaloom.planner.export.bridge_fields import SWITCH_FIELDS, VALUE_FIELDS
from megaloom.planner.export.megatron_fsdp import GATHERS_8_BITS
from megaloom.planner.runs.settings.flag_words import SettingsRun, flag_words, renamed
from megaloom.planner.runs.settings.interpolation import Interpolation
from megaloom.planner.runs.settings.tree import Setting, Tree, found, items_of_list, leaves, setting_at
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
_FLAGS = {path: option for option, path in VALUE_FIELDS.items()} | {
    "comm_overlap.tp_comm_overlap": "tp-comm-overlap",
    "comm_overlap.overlap_moe_expert_parallel_comm": "overlap-moe-expert-parallel-comm",
    "comm_overlap.overlap_grad_reduce": "overlap-grad-reduce",
    "comm_overlap.overlap_param_gather": "overlap-param-gather",
    "ddp.average_in_collective": "ddp-average-in-collective",
    "train.manual_gc": "manual-gc",
}
"""Fields, and the flags of Megatron-LM that say it."""
_SWITCHED = {next(iter(fields.items())): option for option, fields in SWITCH_FIELDS.items() if fields}
"""Fields with the values that a switch of Megatron-LM stands for; of several, the first tells it."""
_SILENT = frozenset(path for fields in SWITCH_FIELDS.values() for path in fields) | {
    "model.gated_linear_unit",  # read with the activation
    "model.transformer_layer_spec",
    "model.deallocate_pipeline_outputs",
    "model.batch_p2p_comm",
    "model.params_dtype",
    "model.pipeline_dtype",
}
"""Fields that need no flag where no switch stands for their value."""
_ACTIVATIONS = {"silu": "swiglu", "swiglu": "swiglu", "quick_gelu": "quick-geglu", "squared_relu": "squared-relu"}
_PRECISIONS = {
    "bf16_mixed": ("--bf16",),
    "bf16": ("--bf16",),
    "fp16_mixed": ("--fp16",),
    "16_mixed": ("--fp16",),
    "fp16": ("--fp16",),
    "bf16_with_fp8_current_scaling_mixed": ("--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"),
    "bf16_with_fp8_delayed_scaling_mixed": ("--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "delayed"),
    "bf16_with_fp8_subchannel_scaling_mixed": ("--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "blockwise"),
    "bf16_with_mxfp8_mixed": ("--bf16", "--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"),
    "bf16_with_nvfp4_mixed": ("--bf16", "--fp4-format", "e2m1", "--fp4-recipe", "nvfp4"),
}
"""Named recipes of mixed precision, as flags."""


def is_bridge(tree: Tree | None) -> bool:
    """Return True for settings with a model and a section of Megatron-Bridge's recipes."""
    model = found(tree, "model")
    return isinstance(model, Mapping) and any(isinstance(found(tree, s), Mapping) for s in _SECTIONS)


def bridge_run(tree: Tree, environment: Mapping[str, str]) -> SettingsRun:
    """Return the settings as a command line. What a recipe sets is not in it."""
    inserted = Interpolation(tree, environment)
    resolved = inserted.resolved(tree)
    return SettingsRun(framework="Megatron-Bridge", words=tuple(_words(resolved)), assumed=tuple(inserted.assumed))


def _words(tree: Tree | None) -> Iterator[Word]:
    for path, value in leaves(tree):
        if not (path == "model.virtual_pipeline_model_parallel_size" and _has_stages(tree)):
            yield from _field_words(path, value)
    yield from _activation(tree)
    groups = setting_at(tree, "model.num_query_groups")
    if groups:
        yield Word("--group-query-attention", groups.word.origin)
    if found(tree, "model.seq_length") is None:
        yield from renamed(
            "--seq-length", setting_at(tree, "dataset.sequence_length") or setting_at(tree, "dataset.seq_length")
        )
    precision = found(tree, "mixed_precision")
    if isinstance(precision, Setting) and precision.kind != "null":
        known = _PRECISIONS.get(precision.text.replace("-", "_"), (f"--{precision.text}",))
        yield from (Word(text, precision.word.origin) for text in known)
        sharded = setting_at(tree, "ddp.use_megatron_fsdp")
        if sharded and sharded.is_true and {"tensorwise", "delayed", "mxfp8"} & {*known}:
            yield Word(f"--{GATHERS_8_BITS}", precision.word.origin)  # training/mixed_precision.py: fp8_param_gather


def _has_stages(tree: Tree | None) -> bool:
    """Return whether a text states the layers of each stage, and so the number of model chunks."""
    return setting_at(tree, "model.pipeline_model_parallel_layout") is not None


def _field_words(path: str, value: Tree) -> Iterator[Word]:
    """Yield the flags of one field; none for a field that no flag is needed for."""
    section, _, key = path.partition(".")
    if path in _FLAGS:
        yield from flag_words(_FLAGS[path].replace("-", "_"), value)
    elif isinstance(value, Setting) and (option := _SWITCHED.get((path, value.text.capitalize()))):
        yield Word(f"--{option}", value.word.origin)
    elif path in ("model.window_size", "model.moe_layer_freq") and not isinstance(value, Setting):
        items = items_of_list(value)
        text = ",".join(item.text for item in items)
        flag = f"--{key.replace('_', '-')}"
        yield from renamed(flag, items[0] if items else None, f"[{text}]" if key == "moe_layer_freq" else text)
    elif section == "model" and path not in _SILENT:
        yield from flag_words(key, value)


def _activation(tree: Tree | None) -> Iterator[Word]:
    """Yield the flag of the activation, and that of one whose bias is added by a kernel of its own."""
    act, gated = setting_at(tree, "model.activation_func"), setting_at(tree, "model.gated_linear_unit")
    is_gated = gated is not None and gated.is_true
    name = act.text.rpartition(".")[2] if act else "silu" if is_gated else "gelu"
    if (act or is_gated) and name != "gelu":
        option = _ACTIVATIONS.get(name, name)
        if (option in ("swiglu", "quick-geglu")) is not is_gated:
            option = f"{'gated-' if is_gated else ''}{name}"
        given = act or gated
        assert given is not None
        yield Word(f"--{option}", given.word.origin)
    fused = setting_at(tree, "model.bias_activation_fusion")
    if fused and not fused.is_true and is_gated:
        yield Word("--no-bias-swiglu-fusion", fused.word.origin)
