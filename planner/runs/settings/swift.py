"""ms-swift: `megatron sft` and `megatron pt`, whose options are Megatron-LM's destinations beside its own.

Defaults are those of ms-swift 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, takewhile
from pathlib import PurePath

from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.settings.flag_words import SettingsRun, flag_words
from megaloom.planner.runs.settings.overrides import repeated_names
from megaloom.planner.runs.settings.tree import Setting, Tree, plain_setting
from megaloom.planner.runs.words import Command, Origin, Word

SUBCOMMANDS = frozenset({"sft", "pt"})
OTHER_SUBCOMMANDS = {"rlhf": "learns from preferences or rewards", "export": "converts checkpoints"}
_DEFAULTS = {
    "micro_batch_size": "--micro-batch-size 1",
    "global_batch_size": "--global-batch-size 16",
    "recompute_granularity": "--recompute-granularity selective",
    "use_distributed_optimizer": "--use-distributed-optimizer",
    "expert_tensor_parallel_size": "--expert-tensor-parallel-size 1",
    "moe_grouped_gemm": "--moe-grouped-gemm",
    "moe_token_dispatcher_type": "--moe-token-dispatcher-type alltoall",
    "apply_rope_fusion": "--no-rope-fusion",
    "bf16": "--bf16",
}
"""Flags that ms-swift sets unless an option says otherwise, `none` and `false` included."""
_RENAMED = {
    "max_length": "seq_length",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "microbatch_group_size_per_vp_stage": "microbatch_group_size_per_virtual_pipeline_stage",
}
_USUAL = {
    "tuner_type": "full",
    "train_type": "full",
    "freeze_llm": "false",
    "task_type": "causal_lm",
    "torch_dtype": "bfloat16",
}
_IGNORED = """
model model_type model_author model_name model_revision dataset val_dataset cached_dataset cached_val_dataset
load_from_cache_file split_dataset_ratio dataset_num_proc dataset_shuffle num_train_epochs max_epochs save_steps
eval_steps save_total_limit logging_steps output_dir save_safetensors save_strategy merge_lora report_to system
enable_thinking agent_template loss_scale packing padding_free dataloader_num_workers dataloader_pin_memory
dataloader_persistent_workers dataloader_prefetch_factor add_version use_hf hub_token to_hf test_convert_precision
test_convert_dtype save_missing_weights strict lazy_tokenize streaming template truncation_strategy columns
add_non_thinking_prefix ddp_timeout ddp_backend max_shard_size callbacks swanlab_project swanlab_exp_name
freeze_vit freeze_aligner mcore_model bridge_backend external_plugins custom_register_path
create_checkpoint_symlink language_model_only packing_num_proc packing_length save_hf_checkpoint
mtp_decoder_input_detach linear_decoupled_in_proj group_by_length tuner_type train_type torch_dtype task_type
attn_impl new_special_tokens remove_unused_columns ignore_args_error use_chat_template
"""
_HARMLESS = frozenset(_IGNORED.split())
"""Options of ms-swift that change neither the layout nor the arithmetic of a training step."""
_LISTS = frozenset(
    {
        *("dataset", "val_dataset", "cached_dataset", "cached_val_dataset", "model_name", "model_author", "report_to"),
        *("external_plugins", "custom_register_path", "callbacks", "new_special_tokens", "system", "columns"),
    }
)
"""Options that take several values."""


def is_swift(command: Command) -> bool:
    """Return True for a command of ms-swift that runs Megatron."""
    return _subcommand(command) is not None


def swift_run(command: Command) -> SettingsRun:
    """Return the run of a command of ms-swift. Raise UserError for those that do not train all weights.

    Sequences are taken to be `--max_length` long, as with `--packing true`.
    """
    at = _subcommand(command)
    assert at is not None
    name, options = command.words[at], _options(command.words[at + 1 :])
    if name.text in OTHER_SUBCOMMANDS:
        raise UserError(f"{name.origin}: megatron {name.text} {OTHER_SUBCOMMANDS[name.text]}, which is not read")
    if command.words[at + 1 :] and not (first := command.words[at + 1]).text.startswith("--"):
        raise UserError(f"{first.origin}: a word before the options of ms-swift, at which it stops")
    for key in ("model", *_USUAL, *(_HARMLESS - _LISTS)):
        if len(several := options.get(key, ())) > 1:
            raise UserError(f"{several[1].origin}: --{key} has one value, got {len(several)}")
    for key, usual in _USUAL.items():
        value = options.get(key)
        if value and value[0].text.lower() != usual:
            raise UserError(f"{value[0].origin}: --{key} other than {usual} is not modelled")
    model = options.get("model")
    return SettingsRun(
        framework="ms-swift",
        words=(*_defaults(options, name.origin), *_words(options, name.origin)),
        nodes=command.environment.get("NNODES"),
        per_node=command.environment.get("NPROC_PER_NODE"),
        model=model[0] if model else None,
        repeated=_repeated(command.words[at + 1 :]),
    )


def _defaults(options: Mapping[str, Sequence[Word]], origin: Origin) -> Iterator[Word]:
    for key, text in _DEFAULTS.items():
        if key not in options:
            yield from (Word(word, origin) for word in text.split())


def _subcommand(command: Command) -> int | None:
    """Return the position of the word after `megatron` that says what it does."""
    names = [PurePath(word.text).name for word in command.words]
    for position, (name, after) in enumerate(pairwise(names)):
        if name == "megatron" and (after in SUBCOMMANDS or after in OTHER_SUBCOMMANDS):
            return position + 1
    return None


def _options(words: Sequence[Word]) -> Mapping[str, Sequence[Word]]:
    """Return the values of each option by its name with underscores; `--key=value` is one of them."""
    found: dict[str, Sequence[Word]] = {}
    for position, word in enumerate(words):
        name, equals, value = word.text.partition("=")
        if name.startswith("--"):
            after = takewhile(lambda one: not one.text.startswith("--"), words[position + 1 :])
            found[name[2:].replace("-", "_")] = [evolve(word, text=value)] if equals else list(after)
    return found


def _repeated(words: Sequence[Word]) -> tuple[Word, ...]:
    """Return the options that stand again with another value."""
    starts = [position for position, word in enumerate(words) if word.text.startswith("--")]
    return repeated_names(
        (evolve(words[start], text=name), [word.text for word in values])
        for start, end in zip(starts, [*starts[1:], len(words)], strict=True)
        for name, values in _options(words[start:end]).items()
    )


def _words(options: Mapping[str, Sequence[Word]], origin: Origin) -> Iterator[Word]:
    for key, values in options.items():
        name = _RENAMED.get(key, key)
        if key not in _HARMLESS and values:
            yield from flag_words(name, _value(values))
        elif key not in _HARMLESS:
            yield Word(f"--{name.replace('_', '-')}", origin)  # a switch without a value is on


def _value(values: Sequence[Word]) -> Tree:
    """Return the values of an option: one setting, or a list of several."""
    settings = [Setting(word, plain_setting(word.text, word.origin).kind) for word in values]
    return settings[0] if len(settings) == 1 else settings
