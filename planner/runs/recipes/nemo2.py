"""A recipe of NeMo 2 as settings of Megatron-Bridge, whose names for fields of models are the same.

A recipe is `run.Partial(pretrain, model=…, trainer=…, data=…, optim=…)`, or the call of `llm.pretrain` itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.settings.bridge import bridge_run
from megaloom.planner.runs.settings.flag_words import SettingsRun
from megaloom.planner.runs.settings.tree import Setting, Tree, is_null, overlaid, setting_at
from megaloom.planner.runs.words import Origin, Word

from .classes import class_fields, overrides_method
from .evaluate import RecipeEvaluator
from .values import Instance, Known, Lacking, Value, as_tree, truth

LLM = "nemo.collections.llm"
NEMO_MODELS = frozenset(
    {"GPTModel", "LlamaModel", "MixtralModel", "MistralModel", "Qwen2Model", "Qwen3Model", "NemotronModel"}
)
"""Classes of models that are Megatron-core's GPT with the fields of their configuration."""
SCALED = "Llama31Config"
SCALING = frozenset({"scale_factor", "low_freq_factor", "high_freq_factor", "old_context_len"})
"""The class that scales rotary positions itself, and its fields for that, of which the first differs between models."""
OF_STRATEGY = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "sequence_parallel",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "microbatch_group_size_per_vp_stage",
    "pipeline_model_parallel_layout",
)
"""Fields of MegatronStrategy that have the names of megatron-core."""
OF_PRECISION = (
    "fp8",
    "fp8_recipe",
    "fp8_param_gather",
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
)
OF_DDP = ("overlap_grad_reduce", "overlap_param_gather", "average_in_collective")
OF_OVERLAP = ("tp_comm_overlap", "overlap_grad_reduce", "overlap_param_gather", "overlap_moe_expert_parallel_comm")
NEMO_PRECISIONS = {"bf16-mixed": "bf16_mixed", "16-mixed": "fp16_mixed"}
UNREAD = frozenset(
    {
        "persist_layer_norm",
        "forward_step_fn",
        "data_step_fn",
        "generation_config",
        "transformer_layer_spec",
        "use_transformer_engine_full_layer_spec",
        "use_transformer_engine_op_fuser",
        "init_method_std",
        "params_dtype",
        "bf16",
        "fp16",
        "parallel_output",
        "scatter_embedding_sequence_parallel",
        "tp_only_amax_red",
        "deallocate_pipeline_outputs",
        "tp_comm_overlap_cfg",
        "vocab_size",
        "tp_comm_overlap",
        "bias_dropout_add_fusion",
        "use_te_rng_tracker",
    }
)
"""Fields of models that change no step, or that are read elsewhere."""


def nemo2_run(
    config: Value, path: str, evaluator: RecipeEvaluator, overrides: Tree, environment: Mapping[str, str]
) -> SettingsRun:
    """Return the run of a recipe with settings that count more. Raise UserError for what is not known of it."""
    trainer = _object(config, "trainer")
    strategy = _object(trainer, "strategy")
    if not isinstance(config, Instance) or trainer is None or strategy is None:
        raise UserError(f"{path} builds no recipe of NeMo 2 with a model and a trainer with a strategy")
    if strategy.last != "MegatronStrategy":
        raise UserError(f"{strategy.origin}: the strategy {strategy.last:.40} of NeMo 2 is not modelled")
    _check_unadapted(config)
    data = _object(config, "data") or Instance("", config.origin)
    model = overlaid(_model(config, evaluator), _fields(strategy, OF_STRATEGY)) or {}
    model = overlaid(model, _of_fp8(trainer)) or {}
    tree: dict[str, Tree] = {
        "model": overlaid(model, _fields(data, ("seq_length",))) or {},
        "train": _fields(data, ("global_batch_size", "micro_batch_size")),
        "ddp": _data_parallel(config, strategy),
        "mixed_precision": _precision(trainer, strategy),
    }
    for callback in _callbacks(trainer):
        tree["comm_overlap"] = _overlaps(callback)
    words = bridge_run(overlaid(tree, overrides) or {}, environment)
    sharded = _sharding(strategy)
    vocab = _vocabulary(config, evaluator)
    return evolve(
        words,
        framework="NeMo 2",
        words=(*words.words, *sharded, *vocab),
        nodes=_number(trainer, "num_nodes"),
        per_node=_number(trainer, "devices"),
    )


def _object(value: Value | None, name: str) -> Instance | None:
    one = value.fields.get(name) if isinstance(value, Instance) else None
    return one if isinstance(one, Instance) else None


def _fields(owner: Instance, names: tuple[str, ...]) -> Tree:
    """Return those of these fields that an object states."""
    trees = {name: as_tree(owner.fields[name]) for name in names if name in owner.fields}
    return {name: tree for name, tree in trees.items() if tree is not None}


def _check_unadapted(config: Instance) -> None:
    peft = config.fields.get("peft")
    if peft is not None and not (isinstance(peft, Known) and peft.value is None):
        raise UserError(f"{config.origin}: adapters of NeMo 2 are not modelled")


def _configured(config: Instance) -> Instance:
    """Return the object that configures the model. Raise UserError for a class of models that is not known."""
    model = _object(config, "model")
    if model is None or model.last not in NEMO_MODELS:
        if model is not None and "recipes" in model.name.split("."):
            raise UserError(
                f"{model.origin}: the file of {model.name} is not there\n"
                "read this beside a clone of NeMo, or where it is installed"
            )
        shown = model.last if model else "?"
        origin = model.origin if model else config.origin
        raise UserError(
            f"{origin}: the model {shown:.40} of NeMo 2 is not read\nread are {', '.join(sorted(NEMO_MODELS))}"
        )
    found = model.fields.get("config") or next(iter(model.arguments), None)
    if not isinstance(found, Instance):
        raise UserError(f"{model.origin}: the configuration of {model.last} is not known")
    return found


def _class(config: Instance, evaluator: RecipeEvaluator) -> tuple[dict[str, Value], list[str]]:
    """Return the fields of the class of the model's configuration, and the names of its bases and itself."""
    own = _configured(config)
    known = class_fields(own.name, evaluator)
    if known is None:
        raise UserError(
            f"{own.origin}: the sizes of {own.last} are not known, since the file of this class is not there\n"
            "read it beside a clone of NeMo 2, or where it is installed"
        )
    return known


def _model(config: Instance, evaluator: RecipeEvaluator) -> Tree:
    """Return the fields of the model: those of its class, and those that the recipe sets."""
    own, (fields, names) = _configured(config), _class(config, evaluator)
    for name in names:
        last = name.rpartition(".")[2]
        if last not in ("GPTConfig", SCALED) and overrides_method(name, "configure_model", evaluator):
            raise UserError(f"{own.origin}: {last} of NeMo 2 builds its model in a way of its own, which is not read")
    out: dict[str, Tree] = {}
    for name, value in {**fields, **own.fields}.items():
        if name not in UNREAD | SCALING and (tree := as_tree(value)) is not None:
            out[name] = tree
    if any(name.endswith(f".{SCALED}") for name in names):
        out |= _scaled({**fields, **own.fields}, own.origin)
    return out


def _scaled(fields: Mapping[str, Value], origin: Origin) -> Iterator[tuple[str, Tree]]:
    """Yield the fields of megatron-core for scaled rotary positions."""
    yield "rope_scaling", Setting(Word("true", origin), "boolean")
    if (factor := as_tree(fields.get("scale_factor"))) is not None:
        yield "rope_scaling_factor", factor


def _vocabulary(config: Instance, evaluator: RecipeEvaluator) -> Iterator[Word]:
    """Yield the size of the vocabulary, if the model's class or the recipe states it."""
    own, (fields, _) = _configured(config), _class(config, evaluator)
    value = own.fields.get("vocab_size") or fields.get("vocab_size")
    if isinstance(value, Known) and type(value.value) is int:
        yield from (Word("--vocab-size", value.origin), Word(str(value.value), value.origin))


def _data_parallel(config: Instance, strategy: Instance) -> Tree:
    """Return the fields of DDP, and whether the optimizer is distributed: that is NeMo's default."""
    ddp, optim = _object(strategy, "ddp"), _object(_object(config, "optim"), "config")
    stated = optim.fields.get("use_distributed_optimizer") if optim else None
    distributed = stated if stated is not None else Known(optim is None, config.origin)
    out = _fields(ddp, OF_DDP) if ddp else {}
    tree = as_tree(distributed)
    return overlaid(out, {"use_distributed_optimizer": tree} if tree is not None else {}) or {}


def _sharding(strategy: Instance) -> Iterator[Word]:
    """Yield the flags of Megatron-FSDP. Raise UserError for PyTorch's, which is not modelled for Megatron-core."""
    fsdp = strategy.fields.get("fsdp")
    if fsdp is None or (isinstance(fsdp, Known) and fsdp.value is None):
        return
    if not isinstance(fsdp, Known) or fsdp.value != "megatron":
        raise UserError(f"{strategy.origin}: only Megatron-FSDP of NeMo 2 is modelled")
    yield Word("--use-megatron-fsdp", fsdp.origin)
    ddp = _object(strategy, "ddp")
    name = "data_parallel_sharding_strategy"
    stated = setting_at(_fields(ddp, (name,)), name) if ddp else None
    if stated is not None:
        yield from (Word("--data-parallel-sharding-strategy", stated.word.origin), stated.word)


def _plugin(trainer: Instance) -> Instance:
    """Return the plugin of mixed precision. Raise UserError without one."""
    plugins = trainer.fields.get("plugins")
    listed = plugins if isinstance(plugins, list) else [plugins]
    plugin = next((one for one in listed if isinstance(one, Instance) and "MixedPrecision" in one.last), None)
    if plugin is None:
        raise UserError(f"{trainer.origin}: the precision is not known: plugins has no MegatronMixedPrecision")
    return plugin


def _of_fp8(trainer: Instance) -> Tree:
    """Return what the plugin of mixed precision says of fp8, with the names of megatron-core's configuration."""
    return _fields(_plugin(trainer), OF_PRECISION[2:])


def _precision(trainer: Instance, strategy: Instance) -> Tree:
    """Return the format of the trainer's plugin, and that of the reduced gradients."""
    plugin = _plugin(trainer)
    stated = plugin.fields.get("precision") or next(iter(plugin.arguments), None)
    name = NEMO_PRECISIONS.get(str(stated.value)) if isinstance(stated, Known) else None
    if name is None:
        raise UserError(f"{plugin.origin}: the precision of this plugin is none of {', '.join(NEMO_PRECISIONS)}")
    ddp = _object(strategy, "ddp")
    reduced = plugin.fields.get("grad_reduce_in_fp32") or (ddp.fields.get("grad_reduce_in_fp32") if ddp else None)
    in_fp32 = True if reduced is None else truth(reduced)
    kind = "bf16" if name == "bf16_mixed" else "fp16"
    origin = plugin.origin
    section: dict[str, Tree] = {kind: Setting(Word("true", origin), "boolean")}
    fp8 = _fields(plugin, OF_PRECISION[:2])
    section |= fp8 if isinstance(fp8, Mapping) else {}
    if in_fp32 is not None:
        section["grad_reduce_in_fp32"] = Setting(Word(str(in_fp32).lower(), origin), "boolean")
    return section


def _callbacks(trainer: Instance) -> Iterator[Instance]:
    """Yield the callbacks that overlap communication."""
    callbacks = trainer.fields.get("callbacks")
    for one in callbacks if isinstance(callbacks, list) else ():
        if isinstance(one, Instance) and one.last == "MegatronCommOverlapCallback":
            yield one


def _overlaps(callback: Instance) -> Tree:
    """Return what the callback overlaps: gradients and weights where it does not say otherwise."""
    usual = Setting(Word("true", callback.origin), "boolean")
    stated = _fields(callback, OF_OVERLAP)
    given = stated.items() if isinstance(stated, Mapping) else ()
    known = {name: one for name, one in given if not is_null(one)}
    return {"overlap_grad_reduce": usual, "overlap_param_gather": usual, **known}


def _number(owner: Instance, name: str) -> Word | None:
    """Return a number of an object as a word; with what it depends on if that is not known."""
    value = owner.fields.get(name)
    if isinstance(value, Lacking):
        return Word("", value.unknown.origin, (value.unknown,))
    return Word(str(value.value), value.origin) if isinstance(value, Known) and type(value.value) is int else None


def nemo_module(name: str) -> str | None:
    """Return the module of a recipe that NeMo's package imports under a shorter name: `llm.llama3_8b`."""
    short = name.removeprefix(f"{LLM}.")
    return f"{LLM}.recipes.{short}" if short != name and "." not in short else None


def follows_nemo(source: str) -> bool:
    """Return whether a module is one of recipes of NeMo."""
    return source.startswith(f"{LLM}.recipes") or nemo_module(source) is not None
