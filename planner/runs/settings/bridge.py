"""Megatron-Bridge: its configuration, `model.*`, `train.*`, `ddp.*`, from YAML, a script or overrides of a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import evolve

from megaloom.planner.export.bridge_fields import SWITCH_FIELDS, VALUE_FIELDS
from megaloom.planner.export.megatron_fsdp import GATHERS_8_BITS
from megaloom.planner.runs.settings.bridge_closed import is_unread_field
from megaloom.planner.runs.settings.bridge_overlap import with_overlap
from megaloom.planner.runs.settings.bridge_precision import GATHERED, precision_fields
from megaloom.planner.runs.settings.flag_words import SettingsRun, flag_words, renamed
from megaloom.planner.runs.settings.interpolation import Interpolation
from megaloom.planner.runs.settings.near_names import first_origin, near_names, unknown_setting
from megaloom.planner.runs.settings.tree import Setting, Tree, found, is_null, items_of_list, leaves, setting_at
from megaloom.planner.runs.settings.unread import misshapen_settings, unread_settings
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
_OF_CONTAINER = """
model train validation ddp optimizer optimizer_config_override_provider scheduler dataset logger tokenizer checkpoint
dist ft straggler nvrx_straggler profiling peft comm_overlap mixed_precision tensor_inspect inprocess_restart rng
rerun_state_machine env_vars resources config
"""
CONTAINER_FIELDS = frozenset(_OF_CONTAINER.split())
"""Sections of Megatron-Bridge's ConfigContainer (training/config.py, 0.3 to 0.6), and those of its scripts."""
_FLAGS = {path: option for option, path in VALUE_FIELDS.items()} | {
    "comm_overlap.tp_comm_overlap": "tp-comm-overlap",
    "comm_overlap.overlap_moe_expert_parallel_comm": "overlap-moe-expert-parallel-comm",
    "comm_overlap.overlap_grad_reduce": "overlap-grad-reduce",
    "comm_overlap.overlap_param_gather": "overlap-param-gather",
    "ddp.average_in_collective": "ddp-average-in-collective",
    "ddp.bucket_size": "ddp-bucket-size",
    "ddp.pad_buckets_for_high_nccl_busbw": "ddp-pad-buckets-for-high-nccl-busbw",
    "ddp.reduce_scatter_with_fp32_accumulation": "ddp-reduce-scatter-with-fp32-accumulation",
    "ddp.nccl_ub": "use-nccl-ub",
    "comm_overlap.bucket_size": "ddp-bucket-size",
    "comm_overlap.overlap_p2p_comm": "overlap-p2p-comm",
    "train.rampup_batch_size": "rampup-batch-size",
    "train.manual_gc": "manual-gc",
}
"""Fields, and the flags of Megatron-LM that say it."""
_OF_MEGATRON = """
optimizer.optimizer optimizer.use_precision_aware_optimizer optimizer.exp_avg_dtype optimizer.exp_avg_sq_dtype
optimizer.main_params_dtype optimizer.main_grads_dtype optimizer.optimizer_cpu_offload
optimizer.overlap_cpu_optimizer_d2h_h2d optimizer.use_torch_optimizer_for_cpu_offload
optimizer.overlap_param_gather_with_optimizer_step ddp.fsdp_double_buffer ddp.fsdp_manual_registration
ddp.disable_symmetric_registration ddp.use_custom_fsdp train.empty_unused_memory_level mixed_precision.fp8_margin
mixed_precision.fp8_amax_history_len mixed_precision.fp8_amax_compute_algo mixed_precision.fp8_dot_product_attention
mixed_precision.fp8_multi_head_attention mixed_precision.fp4_param_gather
 ddp.outer_dp_sharding_strategy
ddp.keep_fp8_transpose_cache ddp.fp8_param_gather ddp.suggested_communication_unit_size ddp.delay_wgrad_compute
comm_overlap.defer_embedding_wgrad_compute comm_overlap.delay_wgrad_compute
comm_overlap.overlap_param_gather_with_optimizer_step mixed_precision.fp8_param_gather
mixed_precision.first_last_layers_bf16 mixed_precision.reuse_grad_buf_for_mxfp8_param_ag
"""
_SAME_NAMES = frozenset(_OF_MEGATRON.split())
"""Fields outside of the model that have the names of Megatron-LM's flags, and may change a step."""
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_OTHER_NAMES = frozenset({"eval_interval", "eval_iters", "num_epochs", "max_steps"})
_SWITCHED = {next(iter(fields.items())): option for option, fields in SWITCH_FIELDS.items() if fields}
"""Fields with the values that a switch of Megatron-LM stands for; of several, the first tells it."""
_SWITCHES = frozenset(path for path, value in _SWITCHED if value in ("True", "False")) - {"model.rope_scaling"}
"""Fields that are true or false."""
_OTHER_PATHS = ("model.seq_length", "dataset.seq_length", "dataset.sequence_length", "mixed_precision")
_OUTSIDE_OF_MODEL = frozenset(
    path for path in (*_FLAGS, *_SAME_NAMES, *(path for path, _ in _SWITCHED), *_OTHER_PATHS) if path[:6] != "model."
)
_SILENT = frozenset(path for fields in SWITCH_FIELDS.values() for path in fields) | {
    "model.gated_linear_unit",  # read with the activation
    "model.transformer_layer_spec",
    "model.deallocate_pipeline_outputs",
    "model.batch_p2p_comm",
    "model.params_dtype",
    "model.should_pad_vocab",
    "model.pipeline_dtype",
}
"""Fields that need no flag where no switch stands for their value."""
_CLOSED = (
    "model",
    "train",
    "ddp",
    "optimizer",
    "comm_overlap",
    "mixed_precision",
    "optimizer_config_override_provider",
)
"""Sections of which every field is known, and one without effect on a step."""
_READ_IN_PART = (
    *("dataset.seq_length", "dataset.sequence_length", "checkpoint.ckpt_format", "checkpoint.dist_ckpt_format"),
    *(f"tokenizer.{key}" for key in ("use_tokenizer_vocab_size", "vocab_size", "tokenizer_type", "tokenizer_model")),
)
_SILENT_BESIDE = (
    *(f"rng.{key}" for key in ("seed", "te_rng_tracker")),
    *(f"tokenizer.{key}" for key in ("hf_tokenizer_kwargs", "vocab_file", "merge_file")),
)
_ACTIVATIONS = {"silu": "swiglu", "swiglu": "swiglu", "quick_gelu": "quick-geglu", "squared_relu": "squared-relu"}


def is_bridge(tree: Tree | None) -> bool:
    """Return True for settings with a model and a section of Megatron-Bridge's recipes."""
    model = found(tree, "model")
    return isinstance(model, Mapping) and any(isinstance(found(tree, s), Mapping) for s in _SECTIONS)


def bridge_run(tree: Tree, environment: Mapping[str, str]) -> SettingsRun:
    """Return the settings as a command line. What a recipe sets is not in it."""
    inserted = Interpolation(tree, environment)
    resolved = inserted.resolved(tree)
    words, left_out = (
        tuple(_words(resolved)),
        tuple(unread_settings(resolved, (*_CLOSED, *_READ_IN_PART), _SILENT_BESIDE)),
    )
    assumed = tuple(inserted.assumed)
    return SettingsRun(framework="Megatron-Bridge", words=words, assumed=assumed, left_out=left_out)


def _words(tree: Tree | None) -> Iterator[Word]:
    tree = with_overlap(tree)
    sharded = setting_at(tree, "ddp.use_megatron_fsdp")
    if isinstance(tree, Mapping) and "mixed_precision" in tree:
        named = tree["mixed_precision"]
        if not isinstance(named, Setting | Mapping):
            yield unknown_setting("mixed_precision.list", named)
        fields = precision_fields(named, sharded=bool(sharded and sharded.is_true))
        tree = {**tree, "mixed_precision": fields if fields is not None else {}}
    yield from near_names(tree, _OUTSIDE_OF_MODEL, _OTHER_NAMES)
    yield from _unread_sections(tree)
    yield from misshapen_settings(tree, (*_SWITCHES, *_READ_IN_PART))
    if isinstance(tree, Mapping):
        yield from (unknown_setting(name, one) for name, one in tree.items() if name not in CONTAINER_FIELDS)
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
    of_tokenizer = setting_at(tree, "tokenizer.use_tokenizer_vocab_size")
    if of_tokenizer and of_tokenizer.is_true and setting_at(tree, "tokenizer.vocab_size") is None:
        yield Word("--use-tokenizer-vocab-size", of_tokenizer.word.origin)


def _unread_sections(tree: Tree | None) -> Iterator[Word]:
    """Yield as unknown the sections that are read and are no mappings: a name that stands for an object elsewhere."""
    for name in ("model", "train", "ddp", "optimizer", "dataset", "comm_overlap"):
        if section := setting_at(tree, name):
            yield unknown_setting(name, section)


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
    elif path in _SAME_NAMES and isinstance(value, Setting):
        text = value.text.removeprefix("torch.")
        yield from flag_words(key, evolve(value, word=evolve(value.word, text=_DTYPES.get(text, value.text))))
    elif path in _SWITCHES and isinstance(value, Setting):
        _ = value.is_true  # refuses what is neither true nor false
    elif path == f"mixed_precision.{GATHERED}":
        yield Word(f"--{GATHERS_8_BITS}", first_origin(value))
    elif path == "model.use_transformer_engine_op_fuser" and isinstance(value, Setting) and value.word.unknown:
        return  # which perf_recipes/_common.py switches off where a model has it
    elif section == "model" and path not in _SILENT:
        yield from flag_words(key, value)
    elif path not in _SILENT and is_unread_field(path) and not is_null(value):
        yield unknown_setting(path, value)


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
