"""Mixed precision of Megatron-Bridge: its named recipes as fields, and what a run changes of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from attrs import evolve

from megaloom.planner.runs.settings.tree import Setting, Tree, overlaid, plain_setting, setting_at

RECIPE = "recipe"
"""The field that has the name of a recipe, where other fields stand beside it."""
GATHERED = "gathers_8_bits"
"""The field for weights that Megatron-FSDP gathers in 8 bits."""
_FP8 = "bf16=true fp8=hybrid fp8_recipe"
_NAMED = {
    "bf16_mixed": "bf16=true",
    "bf16": "bf16=true",
    "fp16_mixed": "fp16=true",
    "16_mixed": "fp16=true",
    "fp16": "fp16=true",
    "bf16_with_fp8_current_scaling_mixed": f"{_FP8}=tensorwise first_last_layers_bf16=true fp8_param_gather=true",
    "bf16_with_fp8_delayed_scaling_mixed": f"{_FP8}=delayed fp8_param_gather=true",
    "bf16_with_fp8_subchannel_scaling_mixed": f"{_FP8}=blockwise",
    "bf16_with_mxfp8_mixed": "bf16=true fp8=e4m3 fp8_recipe=mxfp8 fp8_param_gather=true",
    "bf16_with_nvfp4_mixed": "bf16=true fp4=e2m1 fp4_recipe=nvfp4",
}
PRECISION_RECIPES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {name: dict(pair.split("=", 1) for pair in text.split()) for name, text in _NAMED.items()}
)
"""Named recipes, by their fields that are not those of `MixedPrecisionConfig()` (training/mixed_precision.py, 0.7)."""


def precision_fields(section: Tree | None, *, sharded: bool) -> Tree | None:
    """Return the fields of mixed precision: those of the recipe that is named, and those that are stated beside it.

    sharded: Megatron-FSDP shards the weights. A recipe that is not known is a field of its own name.
    """
    name = setting_at(section, RECIPE if isinstance(section, Mapping) else "")
    if name is None:
        return section if isinstance(section, Mapping) else None
    known = PRECISION_RECIPES.get(name.text.replace("-", "_"))
    if known is None:
        return {name.text: name}
    fields: Tree = {key: evolve(plain_setting(text, name.word.origin)) for key, text in known.items()}
    stated = {key: one for key, one in section.items() if key != RECIPE} if isinstance(section, Mapping) else {}
    both = overlaid(fields, stated)
    assert isinstance(both, Mapping)
    gathers = both.get("fp8_param_gather")
    if sharded and isinstance(gathers, Setting) and gathers.is_true:
        return {**{key: one for key, one in both.items() if key != "fp8_param_gather"}, GATHERED: gathers}
    return both
