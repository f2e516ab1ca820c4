"""NeMo 1: `trainer` and `model` with names of its own for many of Megatron-LM's arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.settings.flag_words import SettingsRun, flag_words, renamed, switch_words
from megaloom.planner.runs.settings.interpolation import Interpolation
from megaloom.planner.runs.settings.near_names import first_origin, near_names, unknown_setting
from megaloom.planner.runs.settings.tree import Setting, Tree, found, is_null, items_of_list, leaves, setting_at
from megaloom.planner.runs.settings.unread import misshapen_settings, unread_settings
from megaloom.planner.runs.words import Unknown, Word

_RENAMED = {
    "encoder_seq_length": "seq_length",
    "layernorm_epsilon": "norm_epsilon",
    "rotary_percentage": "rotary_percent",
    "num_moe_experts": "num_experts",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "activations_checkpoint_granularity": "recompute_granularity",
    "activations_checkpoint_method": "recompute_method",
    "activations_checkpoint_num_layers": "recompute_num_layers",
    "ub_tp_comm_overlap": "tp_comm_overlap",
    "bias_dropout_add_fusion": "bias_dropout_fusion",
    "sync_batch_comm": "",
    "batch_p2p_comm": "",
}
"""Names of NeMo and of Megatron-LM; an empty one has no flag, and changes neither time nor memory of a step."""
_VALUES = (
    "normalization",
    "bias",
    "activation",
    "share_embeddings_and_output_weights",
    "fp8",
    "fp8_e4m3",
    "fp8_hybrid",
    "fp8_params",
    "num_query_groups",
    "fsdp",
    "bias_activation_fusion",
)
"""Keys of the model that are single values, and read with others."""
_READ_BELOW = frozenset(
    {
        *_VALUES,
        "tokenizer",
        "optim",
        "data",
        "nsys_profile",
        "rampup_batch_size",
    }
)
_HARMLESS = frozenset(
    {
        "mcore_gpt",
        "tp_only_amax_red",
        "precision",  # which the trainer's replaces
        "get_attention_mask_from_fusion",
        "answer_only_loss",
        "seed",
        "resume_from_checkpoint",
        "use_cpu_initialization",
        "onnx_safe",
        "apex_transformer_log_level",
        "pre_process",
        "post_process",
        "persist_layer_norm",
        "headscale",
        "transformer_block_type",
        "openai_gelu",
        "normalize_attention_scores",
        "attention_type",
        "scale_positional_embedding",
        "native_amp_init_scale",
        "native_amp_growth_interval",
        "hysteresis",
        "megatron_amp_O2",
        "grad_allreduce_chunk_size_mb",
        "grad_div_ar_fusion",
        "gradient_as_bucket_view",
        "transformer_engine",
        "use_scaled_init_method",
        "ffn_dropout",
        "do_layer_norm_weight_decay",
        "use_flash_attention",
        "gc_interval",
        "sharp",
        "fp8_margin",
        "fp8_interval",
        "fp8_amax_history_len",
        "fp8_amax_compute_algo",
        "fp8_wgrad",
        "reduce_amax",
        "deterministic_mode",
        "fsdp_sharding_strategy",
        "fsdp_grad_reduce_dtype",
        "fsdp_sharded_checkpoint",
        "name",
        "restore_from_path",
        "use_te_rng_tracker",
        "dist_ckpt_format",
        "ub_tp_comm_overlap_cfg",
        "sync_batch_comm",
        "num_micro_batches_with_partial_activation_checkpoints",
        "activations_checkpoint_layers_per_pipeline",
    }
)
"""Keys that change neither the sizes of a model nor its layout, and hardly time or memory."""
_SECTIONS = ("inference", "export", "megatron_timer_kwargs", "custom")
"""Sections of the model that change no step; `custom` has the warm-up, logs and targets of runs of MLPerf."""
_SECTIONS_READ = ("optim", "data", "tokenizer")
"""Sections of which only some keys are read."""
_CHECKPOINTS = "dist_ckpt_"
"""Prefix of the options of checkpoints."""
_PATHS = (
    *(f"trainer.{key}" for key in ("devices", "num_nodes", "precision")),
    *(f"model.optim.{key}" for key in ("name", "overlap_grad_sync", "overlap_param_sync", "grad_sync_dtype")),
    *(f"model.tokenizer.{key}" for key in ("library", "type", "vocab_file", "merge_file")),
)
_READ = (
    *_PATHS,
    *(f"model.data.{key}" for key in ("reset_position_ids", "reset_attention_mask")),
    "model.nsys_profile",
)
_OF_TRAINER = """
accelerator logger enable_checkpointing use_distributed_sampler max_epochs max_steps max_time log_every_n_steps
val_check_interval limit_val_batches limit_test_batches limit_train_batches gradient_clip_val benchmark
enable_model_summary num_sanity_val_steps enable_progress_bar check_val_every_n_epoch reload_dataloaders_every_n_epochs
"""
_OF_OPTIMIZER = "lr min_lr weight_decay betas eps sched capturable exclude_norm"
_OF_DATA = """
data_prefix index_mapping_dir data_impl mmap_bin_files splits_string seq_length skip_warmup num_workers
num_dataset_builder_threads dataloader_type eod_mask_loss validation_drop_last no_seqlen_plus_one_input_tokens
pad_samples_to_global_batch_size shuffle_documents exchange_indices_distributed data_cache_generation_only
"""
_SILENT = (
    *("name", "restore_from_path", "exp_manager", "run", "hydra", "s3_checkpointing"),
    *(f"trainer.{key}" for key in _OF_TRAINER.split()),
    *(f"model.optim.{key}" for key in _OF_OPTIMIZER.split()),
    *(f"model.data.{key}" for key in _OF_DATA.split()),
    *(f"model.tokenizer.{key}" for key in ("model", "delimiter", "sentencepiece_legacy", "use_fast")),
)
"""Keys beside those that are read, which change no step."""
_ADAM = frozenset({"adam", "adamw", "fused_adam", "megatron_fused_adam"})
_DISTRIBUTED = frozenset({"mcore_distributed_optim", "distributed_fused_adam"})
_NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "layernorm1p": "LayerNorm"}


def is_nemo(tree: Tree | None) -> bool:
    """Return True for settings of NeMo 1: a trainer with devices, and a model with parallel sizes."""
    return found(tree, "trainer.devices") is not None and found(tree, "model.tensor_model_parallel_size") is not None


def nemo_run(tree: Tree, environment: Mapping[str, str], missing: tuple[Unknown, ...]) -> SettingsRun:
    """Return the run of a NeMo file."""
    inserted = Interpolation(tree, environment, ("training", "fine_tuning", "peft"))
    resolved = inserted.resolved(tree)
    nodes, per_node = setting_at(resolved, "trainer.num_nodes"), setting_at(resolved, "trainer.devices")
    model = found(resolved, "model")
    words = (
        *near_names(resolved, _PATHS),
        *misshapen_settings(resolved, (*_PATHS, *(f"model.{key}" for key in _VALUES))),
        *_model_words(model),
        *_precision(resolved),
        *_optimizer(found(model, "optim")),
        *_tokenizer(model),
        *_documents(found(model, "data")),
    )
    return SettingsRun(
        framework="NeMo 1",
        words=words,
        nodes=nodes.word if nodes else None,
        per_node=per_node.word if per_node else None,
        unknown=missing,
        assumed=tuple(inserted.assumed),
        left_out=tuple(_unread(resolved)),
    )


def _unread(tree: Tree | None) -> Iterator[Word]:
    """Yield the settings that are not read. Raise UserError for micro-batches that the trainer adds up."""
    added = setting_at(tree, "trainer.accumulate_grad_batches")
    if added and added.text != "1":
        raise UserError(
            f"{added.word.origin}: NeMo does not start with trainer.accumulate_grad_batches {added.text:.20}"
        )
    model = found(tree, "model")
    closed = [f"model.{key}" for key in (model if isinstance(model, Mapping) else ()) if key not in _SECTIONS_READ]
    read = (*_READ, *closed, "trainer.accumulate_grad_batches")
    yield from unread_settings(tree, read, _SILENT)


def _model_words(model: Tree | None) -> Iterator[Word]:
    offloads = setting_at(model, "cpu_offloading")
    for key, value in model.items() if isinstance(model, Mapping) else ():
        if key in _READ_BELOW or key in _HARMLESS or _RENAMED.get(key) == "" or key.startswith(_CHECKPOINTS):
            continue
        if key.startswith("cpu_offloading_") and not (offloads and offloads.is_true):
            continue
        if key == "virtual_pipeline_model_parallel_size" and isinstance(value, Setting) and value.text == "1":
            continue
        if isinstance(value, Mapping):
            yield from _section(key, value)
        else:
            yield from flag_words(_RENAMED.get(key, key), value)
    groups = setting_at(model, "num_query_groups")
    yield from switch_words("--group-query-attention", groups)
    yield from renamed("--num-query-groups", groups)
    norm = setting_at(model, "normalization")
    yield from renamed("--normalization", norm, _NORMS.get(norm.text, norm.text) if norm else None)
    yield from switch_words("--apply-layernorm-1p", norm if norm and norm.text == "layernorm1p" else None)
    for path, flag in (
        ("bias", "--disable-bias-linear"),
        ("share_embeddings_and_output_weights", "--untie-embeddings-and-output-weights"),
    ):
        given = setting_at(model, path)
        yield from switch_words(flag, given if given and not given.is_true else None)
    yield from _activation(setting_at(model, "activation"), setting_at(model, "bias_activation_fusion"))
    fsdp = setting_at(model, "fsdp")
    yield from switch_words("--use-torch-fsdp2", fsdp if fsdp and fsdp.is_true else None)
    ramp = items_of_list(found(model, "rampup_batch_size"))
    if ramp:
        yield Word("--rampup-batch-size", ramp[0].word.origin)
        yield from (r.word for r in ramp)


def _section(key: str, value: Mapping[str, Tree]) -> Iterator[Word]:
    """Yield as unknown a section of the model that is not read and states anything. Raise UserError for adapters."""
    scheme = setting_at(value, "peft_scheme") if key == "peft" else None
    if scheme and scheme.text.lower() != "none":
        raise UserError(f"{scheme.word.origin}: adapters of NeMo are not modelled")
    values = [one for _, one in leaves(value) if not is_null(one)]
    stated = [one for one in values if not (isinstance(one, Setting) and one.text.lower() in ("", "false"))]
    if stated and key not in ("peft", *_SECTIONS):
        yield unknown_setting(f"model.{key}", value)


def _activation(value: Setting | None, fused: Setting | None) -> Iterator[Word]:
    flags = {"swiglu": "--swiglu", "fast-swiglu": "--swiglu", "squared-relu": "--squared-relu"}
    if value is not None and value.text != "gelu":
        yield Word(flags.get(value.text, f"--{value.text}"), value.word.origin)
    if fused and not fused.is_true:
        gated = value is not None and value.text.endswith("swiglu")
        yield Word("--no-bias-swiglu-fusion" if gated else "--no-bias-gelu-fusion", fused.word.origin)


def _precision(tree: Tree | None) -> Iterator[Word]:
    precision = setting_at(tree, "trainer.precision")
    names = {"bf16": "--bf16", "bf16-mixed": "--bf16", "16": "--fp16", "16-mixed": "--fp16", "32": ""}
    if precision and (flag := names.get(precision.text, f"--precision-{precision.text}")):
        yield Word(flag, precision.word.origin)
    fp8 = setting_at(tree, "model.fp8")
    if fp8 and fp8.is_true:
        e4m3 = setting_at(tree, "model.fp8_e4m3")
        yield from renamed("--fp8-format", fp8, "e4m3" if e4m3 and e4m3.is_true else "hybrid")
        held = setting_at(tree, "model.fp8_params")
        yield from switch_words("--fp8-param-gather", held if held and held.is_true else None)


def _optimizer(optim: Tree | None) -> Iterator[Word]:
    name = setting_at(optim, "name")
    if optim is not None and name is None:
        at = first_origin(optim)
        raise UserError(
            f"{at}: model.optim has no name here, so the optimizer is not known: a parent file states it\n"
            "read the file beside its parent, or give `-- model.optim.name=distributed_fused_adam`"
        )
    if name and name.text not in _DISTRIBUTED | _ADAM:
        yield from renamed("--optimizer", name)  # which is refused
    yield from switch_words("--use-distributed-optimizer", name if name and name.text in _DISTRIBUTED else None)
    for key, flag in (("overlap_grad_sync", "--overlap-grad-reduce"), ("overlap_param_sync", "--overlap-param-gather")):
        value = setting_at(optim, key)
        yield from switch_words(flag, value if value and value.is_true else None)
    dtype = setting_at(optim, "grad_sync_dtype")
    yield from switch_words("--grad-reduce-in-bf16", dtype if dtype and dtype.text == "bf16" else None)


def _tokenizer(model: Tree | None) -> Iterator[Word]:
    library, kind = setting_at(model, "tokenizer.library"), setting_at(model, "tokenizer.type")
    if library and library.text == "huggingface":
        yield from renamed("--tokenizer-type", library, "HuggingFaceTokenizer")
        yield from renamed("--tokenizer-model", kind)
    elif kind:
        yield from renamed("--tokenizer-type", kind)
        for key in ("vocab_file", "merge_file"):
            yield from flag_words(key, found(model, f"tokenizer.{key}"))


def _documents(data: Tree | None) -> Iterator[Word]:
    """Yield what happens at the ends of documents."""
    for key in ("reset_position_ids", "reset_attention_mask"):
        yield from flag_words(key, found(data, key))
