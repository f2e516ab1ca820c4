"""Accelerate's configuration file: the layout of a run. The launched script has the model and the batch.

The user gives these as flags of Megatron-LM: `--set num-layers=32 --set micro-batch-size=1`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.planner.export.accelerate_keys import ACCELERATE_KEYS, MEGATRON_PREFIX, MICROBATCHES, OTHER_DEFAULTS
from megaloom.planner.runs.settings.flag_words import SettingsRun, renamed, switch_words
from megaloom.planner.runs.settings.near_names import near_names, unknown_setting
from megaloom.planner.runs.settings.tree import Setting, Tree, found, plain_setting, setting_at
from megaloom.planner.runs.settings.unread import misshapen_settings, unread_settings
from megaloom.planner.runs.words import Word

ACCELERATE = "Accelerate"
_ASKED = ("num-layers", "hidden-size", "num-attention-heads", "seq-length", "micro-batch-size", "vocab-size")
_PRECISIONS = {"no": (), "bf16": ("--bf16",), "fp16": ("--fp16",), "fp8": ("--bf16", "--fp8-format", "hybrid")}
_TOP_LEVEL = (
    "distributed_type",
    "num_processes",
    "num_machines",
    "mixed_precision",
    "megatron_lm_config",
    "fsdp_config",
)
_OF_FSDP = (
    *(f"fsdp_config.fsdp_{key}" for key in ("sharding_strategy", "reshard_after_forward", "offload_params")),
    "fsdp_config.fsdp_activation_checkpointing",
    *(f"parallelism_config.parallelism_config_{key}_size" for key in ("dp_replicate", "dp_shard", "tp", "cp")),
)
_SILENT = (
    *("compute_environment", "debug", "downcast_bf16", "enable_cpu_affinity", "machine_rank", "main_training_function"),
    *("rdzv_backend", "same_network", "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "use_cpu", "main_process_ip"),
    *("main_process_port", "fsdp_config.fsdp_version", "fsdp_config.fsdp_state_dict_type", "deepspeed_config"),
    *(
        f"fsdp_config.fsdp_{key}"
        for key in ("auto_wrap_policy", "transformer_layer_cls_to_wrap", "cpu_ram_efficient_loading")
    ),
    *(f"fsdp_config.fsdp_{key}" for key in ("sync_module_states", "use_orig_params", "backward_prefetch")),
)
"""Keys that change no step beside those that are read."""
_HARMLESS = frozenset({"gradient_clipping", "train_iters", "eval_iters", "eval_interval", "save_interval", "seed"})
_SHARDING = {
    "FULL_SHARD": "optim_grads_params",
    "SHARD_GRAD_OP": "optim_grads",
    "1": "optim_grads_params",
    "2": "optim_grads",
}
"""Values of FSDP 1's fsdp_sharding_strategy, and Megatron-FSDP's strategies."""


def is_accelerate(tree: Tree | None) -> bool:
    """Return True for a file of `accelerate config`."""
    return setting_at(tree, "distributed_type") is not None and setting_at(tree, "num_processes") is not None


def accelerate_run(tree: Tree, path: str, flags: Sequence[Word]) -> SettingsRun:
    """Return the layout of a file as a command line.

    flags: the user's flags of Megatron-LM, as --name=value. Raise UserError for what is not read, and for a model or a
    batch that they do not state.
    """
    given = {word.text.removeprefix("--").partition("=")[0]: word for word in flags}
    if missing := [name for name in _ASKED if name not in given]:
        options = " ".join(f"--set {name}=…" for name in missing)
        raise UserError(f"{path} has the layout only\ngive model and batch as flags of Megatron-LM: {options}")
    processes, machines = setting_at(tree, "num_processes"), setting_at(tree, "num_machines")
    assert processes is not None
    count, nodes = _number(processes, path), _number(machines, path) if machines else 1
    return SettingsRun(
        framework=ACCELERATE,
        words=(*flags, *_words(tree, path, given, count)),
        nodes=machines.word if machines else Word("1", processes.word.origin),
        per_node=evolve(processes.word, text=str(max(1, count // nodes))),
        left_out=tuple(unread_settings(tree, (*_TOP_LEVEL[:4], "megatron_lm_config", *_OF_FSDP), _SILENT)),
    )


def _number(value: Setting, path: str) -> int:
    if not value.text.isdecimal() or value.text == "0":
        raise UserError(
            f"{value.word.origin if value else path}: a count must be a number from 1, got {value.text:.40}"
        )
    return int(value.text)


def _words(tree: Tree, path: str, given: Mapping[str, Word], count: int) -> Iterator[Word]:
    config = found(tree, "megatron_lm_config")
    keys = {MEGATRON_PREFIX + key for key in (*ACCELERATE_KEYS.values(), MICROBATCHES)}
    yield from near_names(tree, (*_TOP_LEVEL, *_OF_FSDP))
    values = (*_TOP_LEVEL[:4], *_OF_FSDP, *(f"megatron_lm_config.{key}" for key in sorted(keys)))
    yield from misshapen_settings(tree, values)
    for key, unread in config.items() if isinstance(config, Mapping) else ():
        if key not in keys and key.removeprefix(MEGATRON_PREFIX) not in _HARMLESS:
            yield unknown_setting(f"megatron_lm_config.{key}", unread)
    kind, precision = setting_at(tree, "distributed_type"), setting_at(tree, "mixed_precision")
    assert kind is not None
    if precision:
        known = _PRECISIONS.get(precision.text, (f"--{precision.text}",))
        yield from (Word(text, precision.word.origin) for text in known)
    if kind.text == "MEGATRON_LM":
        yield from _megatron_words(found(tree, "megatron_lm_config"), kind, path, given, count)
    elif kind.text == "FSDP":
        yield from _fsdp_words(tree, kind)
    elif kind.text != "MULTI_GPU":
        raise UserError(f"{kind.word.origin}: {kind.text:.40} of Accelerate is not read\nread are MEGATRON_LM and FSDP")


def _megatron_words(
    config: Tree | None, kind: Setting, path: str, given: Mapping[str, Word], count: int
) -> Iterator[Word]:
    values: dict[str, Setting] = {}
    for option, key in ACCELERATE_KEYS.items():
        value = setting_at(config, MEGATRON_PREFIX + key)
        if value is None and option in OTHER_DEFAULTS:
            value = plain_setting(OTHER_DEFAULTS[option], kind.word.origin)
        if value is not None and option not in given:
            values[option] = value
    if _recomputes_nothing(values):
        values = {option: value for option, value in values.items() if not option.startswith("recompute-")}
    for option, value in values.items():
        if value.kind != "boolean":
            yield from renamed(f"--{option}", value)
        elif value.is_true:
            yield from switch_words(f"--{option}", value)
    microbatches = setting_at(config, MEGATRON_PREFIX + MICROBATCHES) or plain_setting("1", kind.word.origin)
    sizes = [_number(values[name], path) if name in values else 1 for name in list(ACCELERATE_KEYS)[:2]]
    ranks = count // (sizes[0] * sizes[1] * _number(values["context-parallel-size"], path))
    micro = given["micro-batch-size"].text.partition("=")[2]
    if "global-batch-size" not in given and micro.isdecimal():
        batch = int(micro) * max(1, ranks) * _number(microbatches, path)
        yield from renamed("--global-batch-size", microbatches, str(batch))


def _recomputes_nothing(values: Mapping[str, Setting]) -> bool:
    """Return whether the first 0 layers of each stage are recomputed."""
    names = ("recompute-granularity", "recompute-method", "recompute-num-layers")
    return [values[name].text if name in values else "" for name in names] == ["full", "block", "0"]


def _fsdp_words(tree: Tree, kind: Setting) -> Iterator[Word]:
    """Yield the flags of Megatron-FSDP for torch's fully_shard, or for FSDP 1."""
    strategy, reshard = (
        setting_at(tree, f"fsdp_config.fsdp_{key}") for key in ("sharding_strategy", "reshard_after_forward")
    )
    offload = setting_at(tree, "fsdp_config.fsdp_offload_params")
    if offload and offload.is_true:
        raise UserError(f"{offload.word.origin}: weights in the memory of the host are not modelled")
    shards = "optim_grads_params" if reshard is None or reshard.is_true else "optim_grads"
    if reshard is None and strategy is not None:
        if strategy.text not in _SHARDING:
            raise UserError(f"{strategy.word.origin}: FSDP with {strategy.text:.40} is not read")
        shards = _SHARDING[strategy.text]
    origin = (reshard or strategy or kind).word.origin
    words = ("--use-megatron-fsdp", "--use-distributed-optimizer", "--data-parallel-sharding-strategy", shards)
    yield from (Word(text, origin) for text in (*words, "--overlap-grad-reduce", "--overlap-param-gather"))
    checkpointing = setting_at(tree, "fsdp_config.fsdp_activation_checkpointing")
    if checkpointing and checkpointing.is_true:
        for flag, value in (("granularity", "full"), ("method", "uniform"), ("num-layers", "1")):
            yield from renamed(f"--recompute-{flag}", checkpointing, value)
    replicas = setting_at(tree, "parallelism_config.parallelism_config_dp_replicate_size")
    if replicas and replicas.text != "1":
        yield from renamed("--num-distributed-optimizer-instances", replicas)
    for axis in ("tp", "cp"):
        degree = setting_at(tree, f"parallelism_config.parallelism_config_{axis}_size")
        if degree and degree.text != "1":
            raise UserError(f"{degree.word.origin}: {axis} {degree.text:.10} beside FSDP of Accelerate is not read")
