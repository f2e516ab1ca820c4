"""verl: `actor_rollout_ref.actor.megatron` of a run of reinforcement learning, mostly as words of a command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import evolve

from megaloom.planner.runs.settings.flag_words import SettingsRun, flag_words, renamed, switch_words
from megaloom.planner.runs.settings.interpolation import Interpolation
from megaloom.planner.runs.settings.near_names import near_names, unknown_setting
from megaloom.planner.runs.settings.tree import Setting, Tree, found, leaves, setting_at
from megaloom.planner.runs.settings.unread import misshapen_settings, unread_settings
from megaloom.planner.runs.settings.verl_closed import ACTOR, CLOSED, verl_words
from megaloom.planner.runs.words import Unknown, Word

_RENAMED = {
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "override_transformer_config.num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "override_transformer_config.num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}
_GROUPS = ("", "override_transformer_config", "override_ddp_config", "override_mcore_model_config")
"""Paths below `actor.megatron` at which keys are Megatron-LM's."""
_READ = (
    *(
        f"{ACTOR}.{key}"
        for key in ("megatron", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz")
    ),
    *(f"data.{key}" for key in ("max_prompt_length", "max_response_length")),
    *(f"trainer.{key}" for key in ("nnodes", "n_gpus_per_node")),
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.rollout.n",
)
_OTHER_KEYS = frozenset({"ppo_micro_batch_size", "ppo_max_token_len_per_gpu"})
_SWITCHED_ON = ("sequence_parallel", "use_distributed_optimizer")
"""Keys of `actor.megatron` that verl's own settings switch on (trainer/config/engine/megatron.yaml, 0.7)."""
_HARMLESS = frozenset(
    {
        "_target_",
        "dist_checkpointing_prefix",
        "use_remove_padding",
        "forward_only",
        "dtype",
        "use_mbridge",
        "vanilla_mbridge",
        "load_weight",
        "use_dist_checkpointing",
        "dist_checkpointing_path",
        "seed",
        "param_offload",
        "grad_offload",
        "optimizer_offload",
    }
)
"""Keys of `actor.megatron` that change neither the layout nor the arithmetic of a training step."""


def is_verl(tree: Tree | None) -> bool:
    """Return True for settings with an actor that Megatron trains."""
    return isinstance(found(tree, f"{ACTOR}.megatron"), Mapping)


def verl_run(tree: Tree, environment: Mapping[str, str]) -> SettingsRun:
    """Return the training of the actor; the sizes of its model are not in the file.

    Its global batch is a mini-batch of prompts times the responses to each prompt.
    """
    resolved = Interpolation(tree, environment).resolved(tree)
    nodes, per_node = setting_at(resolved, "trainer.nnodes"), setting_at(resolved, "trainer.n_gpus_per_node")
    model = setting_at(resolved, "actor_rollout_ref.model.path")
    return SettingsRun(
        framework="verl",
        words=tuple(_words(resolved)),
        nodes=nodes.word if nodes else None,
        per_node=per_node.word if per_node else None,
        model=model.word if model else None,
        left_out=tuple(unread_settings(resolved, CLOSED)),
    )


def _words(tree: Tree | None) -> Iterator[Word]:
    megatron = found(tree, f"{ACTOR}.megatron")
    yield from near_names(tree, _READ, _OTHER_KEYS)
    yield from misshapen_settings(tree, [path for path in _READ if path != f"{ACTOR}.megatron"])
    yield from verl_words(tree)
    yield from _switched_on(megatron)
    for path, value in leaves(megatron):
        key = _RENAMED.get(path, path.rpartition(".")[2])
        if path == "router_replay.mode" and isinstance(value, Setting) and value.text == "disabled":
            continue
        if path.rpartition(".")[0] not in _GROUPS:
            yield unknown_setting(f"megatron.{path}", value)
        elif key not in _HARMLESS:
            yield from flag_words(key, value)
    packed = setting_at(tree, f"{ACTOR}.use_dynamic_bsz")
    yield from switch_words("--pack-sequences", packed if packed and packed.is_true else None)
    yield from renamed("--micro-batch-size", setting_at(tree, f"{ACTOR}.ppo_micro_batch_size_per_gpu"))
    batch, responses = (
        setting_at(tree, f"{ACTOR}.ppo_mini_batch_size"),
        setting_at(tree, "actor_rollout_ref.rollout.n"),
    )
    yield from renamed("--global-batch-size", _combined(batch, responses, "*"))
    prompt, response = setting_at(tree, "data.max_prompt_length"), setting_at(tree, "data.max_response_length")
    yield from renamed("--seq-length", _combined(prompt, response, "+"))
    dtype = setting_at(megatron, "dtype")
    if dtype and dtype.text != "bfloat16":
        yield Word("--fp16" if dtype.text == "float16" else f"--{dtype.text}", dtype.word.origin)
    elif batch:
        yield Word("--bf16", batch.word.origin)


def _switched_on(megatron: Tree | None) -> Iterator[Word]:
    """Yield the switches that are on unless a key says otherwise; sequence parallelism has an effect beside tp only."""
    tp = setting_at(megatron, "tensor_model_parallel_size")
    first = next((one for _, one in leaves(megatron) if isinstance(one, Setting)), None)
    for key in _SWITCHED_ON:
        needed = tp if key == "sequence_parallel" else first
        if needed and needed.text != "1" and setting_at(megatron, key) is None:
            yield Word(f"--{key.replace('_', '-')}", needed.word.origin)


def _combined(first: Setting | None, second: Setting | None, operator: str) -> Setting | None:
    if first is None or second is None:
        return first if operator == "*" else None
    if first.text.isdecimal() and second.text.isdecimal():
        a, b = int(first.text), int(second.text)
        return Setting(evolve(first.word, text=str(a * b if operator == "*" else a + b)), "number")
    unknown = (*first.word.unknown, *second.word.unknown) or (Unknown(first.text, "variable", first.word.origin),)
    return Setting(Word("", first.word.origin, unknown))
