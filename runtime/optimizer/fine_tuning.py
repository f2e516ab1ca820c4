"""The recipe of a run that starts from given weights: smaller learning rates, and routers that stay as they are.

The rates are those with which the authors of published models have fine-tuned them with AdamW.
"""

from __future__ import annotations

from math import inf

from attrs import evolve, frozen

from megaloom.dsl.facts.parameters import params
from megaloom.dsl.graph import Model, graph
from megaloom.dsl.layers.moe import MoE

from .recipe import Recipe


@frozen
class PublishedRate:
    """A peak learning rate for models of up to `params` parameters."""

    params: float
    lr: float
    source: str


FULL = (
    PublishedRate(1e9, 5e-5, "BERT, the largest of its rates: Devlin et al., arXiv:1810.04805, appendix A.3"),
    PublishedRate(100e9, 2e-5, "Llama 2, 7 to 70 B: Touvron et al., arXiv:2307.09288, section 3.1"),
    PublishedRate(inf, 1e-5, "Llama 3, 405 B: arXiv:2407.21783, section 4.1.3"),
)
"""Rates for all weights, by size."""
ADAPTERS = (
    PublishedRate(20e9, 2e-4, "QLoRA, 7 and 13 B: Dettmers et al., arXiv:2305.14314, table 9"),
    PublishedRate(inf, 1e-4, "QLoRA, 33 and 65 B: Dettmers et al., arXiv:2305.14314, table 9"),
)
"""Rates for low-rank adapters, by the size of the model that they adapt."""


def published_rate(model: Model) -> PublishedRate:
    """Return the rate for a model of this size, with or without adapters."""
    size = params(model.without_adapters)
    return next(rate for rate in (ADAPTERS if model.lora else FULL) if size <= rate.params)


def fine_tuning(recipe: Recipe, model: Model) -> Recipe:
    """Return the recipe for a run from given weights: what it does not give, by the size of the model.

    The correction biases of routers stay as they were trained.
    """
    lr = published_rate(model).lr if recipe.lr is None else recipe.lr
    rate = recipe.router_bias_update_rate
    return evolve(recipe, lr=lr, router_bias_update_rate=0.0 if rate is None else rate)


def fine_tuning_note(given: Recipe, model: Model) -> str:
    """Return a line that says what `fine_tuning` has chosen, and the options for it. given: the recipe before."""
    recipe = fine_tuning(given, model)
    rate = f"lr {recipe.peak_lr:g}" + (" as given" if given.lr is not None else " by the size of the model (--lr)")
    parts = [rate]
    mixtures = [n.op for n in graph(model).nodes if isinstance(n.op, MoE)]
    if mixtures:
        balances = sorted({op.balance for op in mixtures})
        parts.append(f"balancing loss {', '.join(f'{b:g}' for b in balances)} (--set balance= for a config.json)")
    if any(op.corrected for op in mixtures) and not model.lora:
        parts.append(f"correction biases move by {recipe.bias_update_rate:g} a step (--router-bias-update-rate)")
    return f"fine-tuning: {'; '.join(parts)}"
