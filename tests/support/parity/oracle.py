"""The oracle of a short run: what the declared mathematics and torch's AdamW make of the runtime's initial weights.

`interpret` computes the layers in one process; this file adds what the runtime does around them: the sum of several
losses, the balancing losses of experts, the correction of their scores after each step, weight decay and clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from attrs import define, frozen
from torch import Tensor

from megaloom.dsl import Model, MoE, Slot, graph, model
from megaloom.runtime.modules.initial_weights import initial_weight
from megaloom.runtime.ops.dropout_masks import MaskSource
from megaloom.runtime.optimizer.recipe import Recipe
from megaloom.runtime.reference.interpret import interpret
from tests.support.parity.torch_twins import Twin

if TYPE_CHECKING:
    from megaloom.runtime.engine.engine import Engine

MOVES = 1e-3  # by which a step moves the correction of an expert: arXiv:2412.19437, 4.2

Batch = Mapping[str, Tensor]


@frozen
class OracleStep:
    """Loss and gradient norm of one step."""

    loss: float
    grad_norm: float


@define(eq=False)
class Oracle:
    """A model by its bodies, its weights, and the optimizer that trains them."""

    model: Model
    recipe: Recipe
    weights: dict[str, Tensor]
    optimizer: torch.optim.Optimizer
    done: int = 0
    twin: Callable[[Mapping[str, Tensor], Batch], Twin] | None = None  # plain torch, in place of the bodies

    @classmethod
    def of(cls, model: Model, recipe: Recipe) -> Oracle:
        """Return the oracle of a run with these initial weights."""
        slots = graph(model).weights
        weights = {k: initial_weight(s, recipe.seed).read().requires_grad_(s.trained) for k, s in slots.items()}
        trained = [(s, weights[k]) for k, s in slots.items() if s.trained]
        groups = (
            {"params": [w for s, w in trained if is_decayed(s) is decay], "weight_decay": amount}
            for decay, amount in ((True, recipe.weight_decay), (False, 0.0))
        )
        optimizer = torch.optim.AdamW(list(groups), recipe.peak_lr, (recipe.beta1, recipe.beta2), recipe.eps)
        return cls(model, recipe, weights, optimizer)

    def step(self, batch: Batch, lr: float | None = None) -> OracleStep:
        """Train on a global batch."""
        return self.step_with_gradients(batch, lr)[0]

    def step_with_gradients(self, batch: Batch, lr: float | None = None) -> tuple[OracleStep, dict[str, Tensor]]:
        """Train on a global batch, and return its gradients too, before clipping."""
        loss, found, choices = self._backward(batch)
        gradients = {name: g.clone() for name, g in found.items()}
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), self.recipe.clip_grad).item()
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.peak_lr if lr is None else lr
        self.optimizer.step()
        rate = self.recipe.router_bias_update_rate  # 0 where a run starts from given weights
        for name, chosen in choices.items():
            counts = chosen.flatten(0, -2).sum(0)
            self.weights[name] += (MOVES if rate is None else rate) * (counts.mean() - counts).sign()
        self.done += 1
        return OracleStep(loss, norm), gradients

    def _backward(self, batch: Batch) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
        """Return loss, gradients, and which experts the tokens went to, by the name of the correction."""
        loss, total, choices = (
            self._declared(batch) if self.twin is None else self._of_twin(self.twin(self.weights, batch))
        )
        self.optimizer.zero_grad()
        total.backward()
        trained = {k: w for k, w in self.weights.items() if w.requires_grad}
        found = {k: torch.zeros_like(w) if w.grad is None else w.grad for k, w in trained.items()}
        return loss.item(), found, choices

    def give(self, weights: Mapping[str, Tensor]) -> None:
        """Start with these weights."""
        with torch.no_grad():
            for name, value in weights.items():
                self.weights[name].copy_(value)

    def balancing_gradients(self, batch: Batch) -> dict[str, Tensor]:
        """Return the gradients of the balancing losses alone."""
        loss, total, _ = self._declared(batch)
        trained = {k: w for k, w in self.weights.items() if w.requires_grad}
        if not (total - loss).requires_grad:
            return {k: torch.zeros_like(w) for k, w in trained.items()}
        found = torch.autograd.grad(total - loss, list(trained.values()), allow_unused=True)
        pairs = zip(trained.items(), found, strict=True)
        return {k: torch.zeros_like(w) if g is None else g for (k, w), g in pairs}

    @staticmethod
    def _of_twin(found: Twin) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return found.loss, found.loss, {name: counts[None] for name, counts in found.counts.items()}

    def _declared(self, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return loss, loss with balancing losses, and which experts the tokens went to, by the bodies."""
        g = graph(self.model)
        mixtures = [n for n in g.nodes if isinstance(n.op, MoE)]
        watched = model(self.model.name, *self.model.outputs, *(n.value.args[0] for n in mixtures))
        masks = MaskSource(self.recipe.seed, self.done, first_sample=0)
        sums, *routed = interpret(watched, self.weights, batch, masks=masks)
        op = g.nodes[g.index[g.outputs[0]]].value.source.op
        terms = sums.reshape(-1, 2)
        coefficients = torch.tensor(getattr(op, "coefficients", (1.0,)), dtype=terms.dtype)
        loss = (coefficients * terms[:, 0] / terms[:, 1]).sum()
        choices, total = {}, loss
        for n, h in zip(mixtures, routed, strict=True):
            scores = h @ self.weights[f"{n.name}.router"] + self.weights.get(f"{n.name}.router_bias", 0.0)
            correction = self.weights.get(f"{n.name}.correction", torch.zeros(n.op.experts))
            chosen = choice(n.op, scores.detach(), correction)
            total = total + balancing(n.op, scores, chosen)
            if n.op.corrected and self.model.lora is None:
                choices[f"{n.name}.correction"] = chosen
        return loss, total, choices


def is_decayed(slot: Slot) -> bool:
    """Return whether weight decay applies: not to vectors, nor to weights that start constant."""
    return len(slot.value.shape.dims) > 1 and slot.std != 0


def choice(op: MoE, scores: Tensor, correction: Tensor) -> Tensor:
    """Return which experts each token goes to, [batch seq experts]: the best experts of the best groups."""
    better = (scores.softmax(-1) if op.score == "softmax" else scores.sigmoid()) + correction
    groups = better.unflatten(-1, (op.groups, -1))
    if op.groups > 1:
        worth = groups.sort(-1).values[..., -op.best :].sum(-1)
        worst = worth.sort(-1).values[..., -op.top_groups, None]
        groups = groups.where((worth >= worst)[..., None], -1.0)
    best = groups.flatten(-2).topk(op.top_k).indices
    return F.one_hot(best, op.experts).sum(2).double()


def balancing(op: MoE, scores: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean over sequences, or that of the batch, of E Σ f P, weighted. scores, chosen: [batch seq experts].

    f is the share of the tokens' choices that an expert got, P its mean probability. Source: arXiv:2101.03961, eq. 4.
    Corrections and groups do not count in f where scores are corrected (arXiv:2412.19437, eq. 18).
    """
    chances = scores.softmax(-1) if op.score == "softmax" else F.normalize(scores.sigmoid(), p=1, dim=-1)
    if op.corrected:
        chosen = F.one_hot(scores.topk(op.top_k).indices, op.experts).sum(2).double()
    tokens = (0, 1) if op.balance_over == "batch" else 1
    shares, chances = (x.mean(tokens) for x in (chosen / op.top_k, chances))
    return op.balance * op.experts * (shares * chances).sum(-1).mean()


def stacked(sample: Callable[[int], Batch], indices: Sequence[int]) -> dict[str, Tensor]:
    """Return these samples as one batch."""
    samples = [sample(i) for i in indices]
    return {name: torch.stack([s[name] for s in samples]) for name in samples[0]}


def learning_rates(engine: Engine, steps: int) -> list[float]:
    """Return the learning rates of the first steps of an engine's schedule."""
    scheduler = engine.state.scheduler
    done, out = scheduler.num_steps, []
    for step in range(steps):
        scheduler.num_steps = step
        out.append(float(scheduler.get_lr({})))
    scheduler.num_steps = done
    return out
