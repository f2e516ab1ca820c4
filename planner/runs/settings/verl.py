"""verl: `actor_rollout_ref.actor.megatron` of a run of reinforcement learning, mostly as words of a command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import evolve

from megaloom.planner.runs.settings.flag_words import SettingsRun, flag_words, renamed
from megaloom.planner.runs.settings.interpolation import Interpolation
from megaloom.planner.runs.settings.tree import Setting, Tree, found, leaves, setting_at
from megaloom.planner.runs.words import Unknown, Word

_ACTOR = "actor_rollout_ref.actor"
_RENAMED = {
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "override_transformer_config.num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "override_transformer_config.num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}
_HARMLESS = frozenset(
    {
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
    return isinstance(found(tree, f"{_ACTOR}.megatron"), Mapping)


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
    )


def _words(tree: Tree | None) -> Iterator[Word]:
    for path, value in leaves(found(tree, f"{_ACTOR}.megatron")):
        key = _RENAMED.get(path, path.rpartition(".")[2])
        if key not in _HARMLESS:
            yield from flag_words(key, value)
    yield from renamed("--micro-batch-size", setting_at(tree, f"{_ACTOR}.ppo_micro_batch_size_per_gpu"))
    batch, responses = (
        setting_at(tree, f"{_ACTOR}.ppo_mini_batch_size"),
        setting_at(tree, "actor_rollout_ref.rollout.n"),
    )
    yield from renamed("--global-batch-size", _combined(batch, responses, "*"))
    prompt, response = setting_at(tree, "data.max_prompt_length"), setting_at(tree, "data.max_response_length")
    yield from renamed("--seq-length", _combined(prompt, response, "+"))
    if batch:
        yield Word("--bf16", batch.word.origin)  # verl trains with Megatron in bf16 only


def _combined(first: Setting | None, second: Setting | None, operator: str) -> Setting | None:
    if first is None or second is None:
        return first if operator == "*" else None
    if first.text.isdigit() and second.text.isdigit():
        a, b = int(first.text), int(second.text)
        return Setting(evolve(first.word, text=str(a * b if operator == "*" else a + b)), "number")
    unknown = (*first.word.unknown, *second.word.unknown) or (Unknown(first.text, "variable", first.word.origin),)
    return Setting(Word("", first.word.origin, unknown))
