"""The DeepSpeed file that a script writes for its own command: its ZeRO stage, and what else changes a step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from posixpath import normpath
from typing import Any

from megaloom.dsl.errors import UserError
from megaloom.dsl.quoting import shortened

from .words import Origin, Word

_HARMLESS = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps steps_per_print gradient_clipping
prescale_gradients gradient_predivide_factor fp16 bf16 bfloat16 wall_clock_breakdown dump_state memory_breakdown
optimizer scheduler tensorboard wandb csv_monitor comms_logger flops_profiler monitor_config aio zero_optimization
zero_allow_untested_optimizer zero_force_ds_cpu_optimizer checkpoint sparse_gradients dataloader_drop_last
data_types seed use_data_before_expert_parallel_ hybrid_engine timers
"""
_OF_ZERO = """
stage overlap_comm contiguous_gradients reduce_scatter reduce_bucket_size allgather_bucket_size allgather_partitions
round_robin_gradients sub_group_size stage3_max_live_parameters stage3_max_reuse_distance
stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_gather_16bit_weights_on_model_save
stage3_gather_fp16_weights_on_model_save load_from_fp32_weights elastic_checkpoint ignore_unused_parameters
memory_efficient_linear legacy_stage1 grad_hooks use_multi_rank_bucket_allreduce
"""
_KNOWN = {"": frozenset(_HARMLESS.split()), "zero_optimization": frozenset(_OF_ZERO.split())}
_OFF: tuple[object, ...] = (False, None, "none", 0, "", {}, [])


def deepspeed_words(words: Sequence[Word], files: Mapping[str, str]) -> Iterator[Word]:
    """Yield `--zero-stage` as the file of `--deepspeed_config` has it, and as unknown what else may change a step.

    A stage that the words state is not yielded again. Raise UserError for a file that is no mapping of JSON.
    """
    texts = [word.text for word in words]
    if "--deepspeed" not in texts:
        return
    for flag, name in pairwise(words):
        if flag.text in ("--deepspeed_config", "--deepspeed-config") and (text := files.get(normpath(name.text))):
            config = _config(text, name)
            zero = config.get("zero_optimization") or {}
            stage = zero.get("stage", 0) if isinstance(zero, dict) else None
            if isinstance(stage, int) and not any(one.partition("=")[0] == "--zero-stage" for one in texts):
                yield Word("--zero-stage", flag.origin)
                yield Word(str(stage), flag.origin)
            yield from _unknown(config, "", flag.origin)


def _config(text: str, name: Word) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        what = f"the file of DeepSpeed {shortened(name.text, 40)} that the script writes is no mapping of JSON"
        raise UserError(f"{name.origin}: {what}\nwhere a variable is missing in it, give it with --env NAME=…")
    return config


def _unknown(section: Mapping[str, Any], path: str, origin: Origin) -> Iterator[Word]:
    """Yield the keys that are not known and say anything: a section that is disabled, and a device none, do not."""
    for key, value in section.items():
        inner = f"{path}.{key}" if path else key
        if key not in _KNOWN[path]:
            if not _is_off(value):
                yield Word(f"--deepspeed_config.{inner}", origin)
        elif inner in _KNOWN and isinstance(value, dict):
            yield from _unknown(value, inner, origin)


def _is_off(value: object) -> bool:
    if isinstance(value, dict):
        switches = [value[name] for name in ("enabled", "device") if name in value]
        return any(one in _OFF for one in switches) or all(map(_is_off, value.values()))
    return value in _OFF
