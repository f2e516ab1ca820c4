"""torchtitan's options that Megatron-LM's flags cannot say: those of little effect are left out, others are refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from attrs import frozen

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.settings.near_names import nearly_spelled
from megaloom.planner.runs.settings.torchtitan_older import RENAMED_OPTIONS
from megaloom.planner.runs.words import Origin, Word

_READ = frozenset(
    {
        "context_parallel_degree",
        "context_parallel_rotate_method",
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "enable_sequence_parallel",
        "expert_parallel_degree",
        "expert_tensor_parallel_degree",
        "fsdp_reshard_after_forward",
        "module_fqns_per_model_part",
        "pipeline_parallel_degree",
        "pipeline_parallel_first_stage_less_layers",
        "pipeline_parallel_last_stage_less_layers",
        "pipeline_parallel_layers_per_stage",
        "pipeline_parallel_microbatch_size",
        "pipeline_parallel_schedule",
        "tensor_parallel_degree",
        "num_pp_microbatches",
    }
)
"""Options of `parallelism` that other modules read."""
_SILENT = frozenset(
    {
        "context_parallel_ptrr_mask_key",
        "enable_compiled_autograd",
        "enable_fsdp_symm_mem",
        "spmd_backend",
    }
)
"""Options of `parallelism` without effect on a layout, and hardly on time."""
_WHOLE = re.compile(r"-?[0-9]{1,9}")
_LEAST = {
    "parallelism.tensor_parallel_degree": 1,
    "parallelism.pipeline_parallel_degree": 1,
    "parallelism.context_parallel_degree": 1,
    "parallelism.expert_parallel_degree": 1,
    "parallelism.expert_tensor_parallel_degree": 1,
    "parallelism.data_parallel_replicate_degree": 1,
    "parallelism.data_parallel_shard_degree": -1,
    "training.seq_len": 1,
    "training.global_batch_size": -1,
}
"""Options that are whole numbers, and the least; -1 stands for what is left, or for no number."""
_BOOLEAN = ("true", "false")
_VALUES = {
    "parallelism.fsdp_reshard_after_forward": ("default", "always", "never"),
    "parallelism.enable_sequence_parallel": _BOOLEAN,
    "training.mixed_precision_param": ("bfloat16", "float32"),
    "training.mixed_precision_reduce": ("float32", "bfloat16"),
}
_NAMES = (
    *("model.name", "model.flavor", "model.converters", "activation_checkpoint.mode"),
    *("training.local_batch_size", "training.batch_size"),
)
_CLOSED = ("training", "parallelism", "activation_checkpoint")
"""Sections in which an option of another section is a mistake."""
_OTHER_KEYS = frozenset({"dataset", "dataset_path", "gc_freq", "gc_debug"})
_OFF = ("", "false", "none", "null", "0", "standard", "default", "1D", "0.0")


@frozen
class _Judged:
    """An option with another value than its usual ones, and the reason why it is refused or left out."""

    option: str
    reason: str
    usual: tuple[str, ...] = _OFF


_REFUSED = (
    _Judged("training.dtype", "weights and optimizer states in bf16 alone are not modelled", ("float32",)),
    _Judged("training.enable_cpu_offload", "weights and optimizer states in host memory are not modelled"),
    _Judged("parallelism.pipeline_parallel_schedule_csv", "a schedule from a file is not modelled"),
    _Judged("parallelism.context_parallel_load_balancer", "only head-tail balance is modelled", ("headtail", "true")),
    _Judged("optimizer.name", "only Adam is modelled", ("Adam", "AdamW", "adam", "adamw")),
    _Judged("optimizer.early_step_in_backward", "an optimizer that steps in the backward pass is not modelled"),
    _Judged("model.num_mtp_layers", "multi-token prediction of torchtitan is not modelled"),
)
_LEFT_OUT = (
    _Judged("parallelism.enable_async_tensor_parallel", "tensor-parallel collectives inside of matrix products"),
    _Judged("compile.enable_async_tensor_parallel", "tensor-parallel collectives inside of matrix products"),
    _Judged("model.tp_gemm_backend", "tensor-parallel collectives inside of matrix products"),
    _Judged("parallelism.expert_parallel_comm_backend", "another exchange of experts"),
    _Judged("parallelism.pipeline_parallel_expert_parallel_overlap", "overlap of the exchange of experts"),
    _Judged("parallelism.expert_parallel_a2a_dtype", "another format of the exchange of experts"),
    _Judged("quantize.linear.float8.recipe_name", "scales of rows instead of tensors", (*_OFF, "tensorwise")),
    _Judged("float8.recipe_name", "scales of rows instead of tensors", (*_OFF, "tensorwise")),
    _Judged("parallelism.prefetch_before_data", "gathers of weights that start before the step"),
    _Judged("parallelism.prefetch_distance", "gathers of weights that start several layers earlier", (*_OFF, "1")),
    _Judged("parallelism.disable_loss_parallel", "a loss over the whole vocabulary on each rank"),
)


READ_OPTIONS = frozenset(
    {
        *(f"parallelism.{key}" for key in _READ),
        *_LEAST,
        *_VALUES,
        *_NAMES,
        *(one.option for one in (*_REFUSED, *_LEFT_OUT)),
        *RENAMED_OPTIONS,
        *("training.enable_loss_parallel", "float8.enable_float8_linear", "float8.enable_fsdp_float8_all_gather"),
        *("quantize.linear.float8.enable_fsdp_float8_all_gather",),
    }
)
"""Options that are read, or judged."""
_OF_TRAINING = "dataset dataset_path steps max_norm warmup_steps gc_freq gc_debug seed deterministic data_parallel_type"
_OF_TOKENS = "num_tokens_per_microbatch_per_dp_rank max_context_length num_tokens_per_train_step"
SILENT_OPTIONS = frozenset(
    {
        *(f"parallelism.{key}" for key in _SILENT),
        *(f"training.{key}" for key in f"{_OF_TRAINING} {_OF_TOKENS}".split()),
        *(f"optimizer.{key}" for key in ("lr", "eps", "beta1", "beta2", "weight_decay", "implementation", "fused")),
        *(f"model.{key}" for key in ("tokenizer_path", "hf_assets_path", "norm_type", "print_after_conversion")),
        *("activation_checkpoint.selective_ac_option", "activation_checkpoint.early_stop", "compile.components"),
    }
)
"""Options that change no step of what is read."""


def check_torchtitan_options(options: Mapping[str, Word]) -> None:
    """Raise UserError for an option whose value is not known, that is not known itself, or that is not modelled."""
    _check_spelling(options)
    known = {one.option for one in (*_REFUSED, *_LEFT_OUT)}
    for name, word in options.items():
        section, _, key = name.partition(".")
        if section not in ("model", "training", "parallelism", "activation_checkpoint"):
            continue
        if word.unknown and (section != "training" or key in ("local_batch_size", "global_batch_size", "seq_len")):
            causes = " and ".join(f"{one.kind} {one.name}" for one in word.unknown)
            raise UserError(f"{word.origin}: {name} depends on {causes}, which is not known")
        if section == "parallelism" and key not in _READ | _SILENT and name not in known:
            raise UserError(f"{word.origin}: the option {name} of torchtitan is not known")
    for judged, word in _found(options, _REFUSED):
        if judged.option.endswith("load_balancer") and _one(options, "parallelism.context_parallel_degree"):
            continue
        raise UserError(f"{word.origin}: {judged.option} {word.text:.40}: {judged.reason}")
    converters = options.get("model.converters")
    for one in converters.text.split(",") if converters is not None else ():
        if one and "float8" not in one:
            raise UserError(f"{options['model.converters'].origin}: torchtitan's converter {one:.40} is not modelled")


def check_torchtitan_numbers(options: Mapping[str, Word]) -> None:
    """Raise UserError for a value that torchtitan would not take, or take for another one."""
    for name, word in options.items():
        least = _LEAST.get(name)
        if least is not None:
            number = int(word.text) if _WHOLE.fullmatch(word.text) else 0
            if number == 0 or number < least:
                other = ", or -1 for what is left" if least < 0 else ""
                raise UserError(f"{word.origin}: {name} must be a whole number from 1{other}, got {word.text:.20}")
        if (values := _VALUES.get(name)) is not None and word.text.lower() not in values:
            raise UserError(f"{word.origin}: {name} must be one of {', '.join(values)}, got {word.text:.20}")


def _check_spelling(options: Mapping[str, Word]) -> None:
    """Raise UserError for a section or an option that is nearly spelled as one that is read."""
    read = {
        *(f"parallelism.{key}" for key in _READ | _SILENT),
        *_LEAST,
        *_VALUES,
        *_NAMES,
        *(one.option for one in (*_REFUSED, *_LEFT_OUT)),
    }
    sections: dict[str, set[str]] = {}
    for option in read:
        section, _, key = option.partition(".")
        sections.setdefault(section, set()).add(key)
    for name, word in options.items():
        section, _, key = name.partition(".")
        near_section = section not in sections and any(nearly_spelled(section, one) for one in sections)
        keys = sections.get(section, set())
        elsewhere = section in sections and any(key in other for other in sections.values())
        if (
            near_section
            or (elsewhere and key not in keys and section in _CLOSED)
            or (key not in keys | _OTHER_KEYS and any(nearly_spelled(key, one) for one in keys))
        ):
            raise UserError(f"{word.origin}: the option {name:.60} of torchtitan is not known")


def left_out_of_torchtitan(options: Mapping[str, Word]) -> Iterator[tuple[str, Origin]]:
    """Yield what a prediction for Megatron-core leaves out of a run of torchtitan, with its lines."""
    for judged, word in _found(options, _LEFT_OUT):
        yield f"{judged.option} ({judged.reason}) is left out", word.origin


def _found(options: Mapping[str, Word], judged: Sequence[_Judged]) -> Iterator[tuple[_Judged, Word]]:
    for one in judged:
        word = options.get(one.option)
        if word is not None and word.text not in one.usual and word.text.lower() not in one.usual:
            yield one, word


def _one(options: Mapping[str, Word], name: str) -> bool:
    word = options.get(name)
    return word is None or word.text == "1"
