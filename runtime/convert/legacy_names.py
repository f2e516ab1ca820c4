"""Tensors of Megatron-LM's own layers, from before megatron-core (2020 to 2024), by the names of megatron-core.

    model["language_model"]["embedding"]["word_embeddings"]["weight"]
    model["language_model"]["transformer"]["layers.0.attention.query_key_value.weight"]     "encoder" since 2021
    model["lm_head"]["dense.weight"], model["word_embeddings_for_head"]["weight"]

The rows of queries, keys and values have three orders, which `checkpoint_version` tells apart. Source: Megatron-LM,
megatron/training/checkpointing.py, fix_query_key_value_ordering, and megatron/legacy/model (October 2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import frozen
from torch import Tensor

from megaloom.dsl.errors import UserError

from .megatron_names import Family

LEGACY = "language_model"
"""The key, or the begin of all keys, of the weights in a checkpoint of these layers."""

LAYERS = {
    "input_layernorm": "input_layernorm",
    "input_norm": "input_layernorm",
    "attention.query_key_value": "self_attention.linear_qkv",
    "attention.dense": "self_attention.linear_proj",
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "inter_attention.query": "cross_attention.linear_q",
    "inter_attention.key_value": "cross_attention.linear_kv",
    "inter_attention.dense": "cross_attention.linear_proj",
    "post_inter_attention_layernorm": "pre_mlp_layernorm",
    "post_inter_attention_norm": "pre_mlp_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}
"""Modules of a layer. The norm after self-attention is not among them: see `_of_layer`."""

AFTER_ATTENTION = ("post_attention_layernorm", "post_attention_norm")
FINAL_NORMS = ("final_layernorm", "final_norm")
HEADS = {
    "lm_head.dense": "lm_head.dense",
    "lm_head.layernorm": "lm_head.layer_norm",
    "lm_head.norm": "lm_head.layer_norm",
    "binary_head": "binary_head",
    "word_embeddings_for_head": "output_layer",
    "language_model.output_layer": "output_layer",
    "language_model.pooler.dense": "pooler.dense",
    "language_model.embedding.word_embeddings": "embedding.word_embeddings",
    "language_model.embedding.position_embeddings": "embedding.position_embeddings",
    "language_model.embedding.tokentype_embeddings": "embedding.tokentype_embeddings",
}
EXPERT_TENSORS = (".mlp.router.", ".mlp.local_experts.")
"""Parts of the names of SwitchMLP, the mixture of experts of these layers."""
SPLITS = {"linear_qkv": 3, "linear_kv": 2}
"""Projections in one matrix."""
PROJECTIONS_FIRST, PROJECTIONS_LAST, CURRENT = 0, 1, (2, 3)
"""Versions of a checkpoint whose rows have projections, then heads and channels; projections last; as megatron-core."""


@frozen
class LegacyModel:
    """The family of a model and the number of its attention heads, which the names in a checkpoint do not say."""

    family: Family
    heads: int


def is_legacy(weights: Mapping[str, Any]) -> bool:
    """Return whether the weights in the file of a rank have the names from before megatron-core."""
    return any(name == LEGACY or name.startswith(f"{LEGACY}.") for name in weights)


def tensors_of_rank(weights: Mapping[str, Any], version: object, model: LegacyModel, tp: int) -> dict[str, Tensor]:
    """Return the tensors of a rank by the names of megatron-core, rows of attention in megatron-core's order.

    version: the checkpoint_version of its file. Names that are not known stay as they are. Raise UserError for an
    unknown version, experts, or rows that are no whole heads.
    """
    if version not in (PROJECTIONS_FIRST, PROJECTIONS_LAST, *CURRENT):
        raise UserError(
            f"checkpoint_version {version!r:.20} is not known\n"
            "versions 0, 1, 2 and 3 are read: load it with its own program, and save it as one of them"
        )
    out = {}
    for name, x in _flat(weights, ""):
        if any(part in name for part in EXPERT_TENSORS):
            raise UserError(
                f"{name} is of a mixture of experts from before megatron-core, which is not read\n"
                "load it with its own Megatron-LM, and save it with --use-mcore-models"
            )
        core = _core_name(name, model.family)
        if version not in CURRENT and (splits := SPLITS.get(core.rpartition(".")[0].rpartition(".")[2])):
            heads = model.heads // tp
            if model.heads % tp or x.shape[0] % (splits * heads):
                what = f"{model.heads} heads on {tp} tensor-parallel ranks"
                raise UserError(f"{name} has {x.shape[0]:,} rows, which are not those of {what}")
            x = _by_heads(x, splits, heads, projections_first=version == PROJECTIONS_FIRST)
        out[core] = x
    return out


def _by_heads(x: Tensor, splits: int, heads: int, *, projections_first: bool) -> Tensor:
    """Return rows in the order heads, projections, channels."""
    channels = x.shape[0] // (splits * heads)
    if projections_first:
        return x.unflatten(0, (splits, heads, channels)).transpose(0, 1).flatten(0, 2)
    return x.unflatten(0, (heads, channels, splits)).transpose(1, 2).flatten(0, 2)


def _flat(weights: Mapping[str, Any], before: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested mappings, by their keys joined with dots."""
    for name, it in weights.items():
        if isinstance(it, Mapping):
            yield from _flat(it, f"{before}{name}.")
        elif isinstance(it, Tensor):
            yield f"{before}{name}", it


def _core_name(name: str, family: Family) -> str:
    """Return the name of a tensor in megatron-core; a name that is not known as it is."""
    if name == "lm_head.bias":
        return f"{'lm_head.' if family is Family.T5 else ''}output_layer.bias"
    module, _, parameter = name.rpartition(".")
    if module in HEADS:
        return f"{HEADS[module]}.{parameter}"
    _, _, inside = module.partition(f"{LEGACY}.")
    stack, _, inside = inside.partition(".")
    if stack not in ("transformer", "encoder", "decoder"):
        return name
    core = "decoder" if stack == "decoder" or family is Family.GPT else "encoder"
    if inside in FINAL_NORMS:
        return f"{core}.final_layernorm.{parameter}"
    layers, _, inside = inside.partition(".")
    number, _, inside = inside.partition(".")
    found = _of_layer(inside, crosses=stack == "decoder")
    return name if layers != "layers" or found is None else f"{core}.layers.{number}.{found}.{parameter}"


def _of_layer(module: str, *, crosses: bool) -> str | None:
    """Return the name of a module of a layer. crosses: it has attention to an encoder, after a norm of its own."""
    if module in AFTER_ATTENTION:
        return "pre_cross_attn_layernorm" if crosses else "pre_mlp_layernorm"
    return LAYERS.get(module)
