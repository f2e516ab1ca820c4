"""Plain torch for the models of `tests.support.models.twins`: an oracle that shares no code with the project.

`TWINS[name](weights, batch)` computes a model from its weights, by their declared names, and a batch of named tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from attrs import define, field, frozen
from torch import Tensor

from tests.support.models.twins import KEY_FACTOR, KEYS, SMOOTHING, Z_FACTOR

Weights = Mapping[str, Tensor]
Batch = Mapping[str, Tensor]


@frozen
class Twin:
    """Means of the losses with their coefficients summed, and the tokens of each expert by the name of a correction."""

    loss: Tensor
    counts: dict[str, Tensor]


@define
class Run:
    """One forward pass: the weights, how many layers of each kind have run, and the tokens of experts."""

    weights: Weights
    batch: Batch
    seen: dict[str, int] = field(factory=dict)
    counts: dict[str, Tensor] = field(factory=dict)

    def next(self, kind: str) -> Callable[[str], Tensor]:
        """Return a function from the name of a weight in the next layer of a kind to the weight."""
        number = self.seen[kind] = self.seen.get(kind, -1) + 1
        return lambda name: self.weights[f"{kind}.{number}.{name}"]


def norm(run: Run, x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * run.next("rms_norm")("scale")


def attention(run: Run, x: Tensor) -> Tensor:
    w = run.next("attention")
    q = torch.einsum("bse,ehd->bhsd", x, w("q"))
    k, v = (torch.einsum("bse,ehd->bhsd", x, w(n)).repeat_interleave(2, 1) for n in "kv")
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    seq = x.shape[1]
    scores = scores.masked_fill(torch.ones(seq, seq).triu(1).bool(), -torch.inf)
    return torch.einsum("bhsd,hde->bse", scores.softmax(-1) @ v, w("o"))


def swiglu(w: Callable[[str], Tensor], x: Tensor) -> Tensor:
    return (F.silu(x @ w("gate")) * (x @ w("up"))) @ w("down")


def mlp(w: Callable[[str], Tensor], x: Tensor) -> Tensor:
    return F.gelu(x @ w("up") + w("up_bias")) @ w("down") + w("down_bias")


def feed_forward(run: Run, x: Tensor) -> Tensor:
    return swiglu(run.next("swiglu"), x)


def biased(run: Run, x: Tensor) -> Tensor:
    return mlp(run.next("mlp"), x)


def experts(
    run: Run, x: Tensor, top_k: int, expert: Callable[..., Tensor], *, sigmoid: bool, shared: bool, scale: float
) -> Tensor:
    """Run every expert on every token, and add up those that the router chose."""
    w = run.next("moe")
    logits = x @ w("router")
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    number = run.seen["moe"]
    correction = run.weights[f"moe.{number}.correction"] if sigmoid else torch.zeros(scores.shape[-1])
    chosen = F.one_hot((scores + correction).topk(top_k).indices, scores.shape[-1]).sum(-2).float()
    gate = scores * chosen
    gate = scale * gate / gate.sum(-1, keepdim=True)
    if sigmoid:
        run.counts[f"moe.{number}.correction"] = chosen.detach().sum((0, 1))
    y = torch.zeros_like(x)
    for i in range(scores.shape[-1]):
        y = y + gate[..., i : i + 1] * expert(lambda name, i=i: w(f"experts.{name}")[i], x)
    return y + swiglu(lambda name: w(f"shared.{name}"), x) if shared else y


def soft_lookup(run: Run, x: Tensor) -> Tensor:
    table, temperature = run.weights["wte"], run.next("soft_lookup")("temperature")
    return (x @ table.T / temperature.log()).sigmoid() @ table * 0.1


def pooled_gate(run: Run, x: Tensor) -> Tensor:
    w = run.next("pooled_gate")
    return x * ((x @ w("p")).tanh().sum(1) @ w("q")).sigmoid()[:, None]


def soft_maximum(run: Run, x: Tensor) -> Tensor:
    w = run.next("soft_maximum")
    return x * ((x @ w("p")).exp().sum(1).log() @ w("q")).sigmoid()[:, None]


def mix(run: Run, x: Tensor) -> Tensor:
    w = run.next("mix")
    before = torch.cat([torch.zeros_like(x[:, :2]), x[:, :-2]], 1)
    return (F.silu((x + before * w("m")) @ w("a")) * (x @ w("b")).sigmoid()) @ w("o")


def next_token(run: Run, logits: Tensor) -> Tensor:
    return cross_entropy(run, logits).mean()


def cross_entropy(run: Run, logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), run.batch["labels"], reduction="none")


def masked(run: Run, logits: Tensor) -> Tensor:
    mask = run.batch["mask"].float()
    return (cross_entropy(run, logits) * mask).sum() / mask.sum()


def smoothed(run: Run, logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), run.batch["labels"], label_smoothing=SMOOTHING)


def with_z_loss(run: Run, logits: Tensor) -> Tensor:
    return next_token(run, logits) + Z_FACTOR * logits.logsumexp(-1).square().mean()


def key_tokens(run: Run, logits: Tensor) -> Tensor:
    keys = sum((run.batch["tokens"] == key).float().sum(1) for key in KEYS)
    mask = run.batch["mask"].float()
    return ((cross_entropy(run, logits) * mask).sum(1) / mask.sum(1) * (1 + KEY_FACTOR * keys)).mean()


def computed(
    layers: tuple[Callable[[Run, Tensor], Tensor], ...],
    loss: Callable[[Run, Tensor], Tensor],
    weights: Weights,
    batch: Batch,
) -> Twin:
    """Return the loss of a decoder with these layers."""
    run = Run(weights, batch)
    x = weights["wte"][batch["tokens"]]
    for layer in layers:
        x = x + attention(run, norm(run, x))
        x = x + layer(run, norm(run, x))
    return Twin(loss(run, norm(run, x) @ weights["head"].T), run.counts)


FF, FF_2 = feed_forward, biased
SIGMOID = partial(experts, top_k=2, expert=swiglu, sigmoid=True, shared=False, scale=1.0)
BIASED = partial(experts, top_k=2, expert=mlp, sigmoid=True, shared=False, scale=1.0)
PLAIN = partial(experts, top_k=3, expert=swiglu, sigmoid=False, shared=True, scale=1.0)
EIGHT = partial(experts, top_k=2, expert=swiglu, sigmoid=True, shared=False, scale=1.5)

TWINS: dict[str, Callable[[Weights, Batch], Twin]] = {
    "smoothed": partial(computed, (FF, FF_2, FF, FF_2), smoothed),
    "z_loss": partial(computed, (FF, FF_2, FF, FF), with_z_loss),
    "key_tokens": partial(computed, (FF, FF_2, FF, FF), key_tokens),
    "masked": partial(computed, (FF, FF_2, FF, FF), masked),
    "soft_lookup": partial(computed, (FF, soft_lookup, FF_2, soft_lookup), next_token),
    "pooled_gate": partial(computed, (pooled_gate, FF, pooled_gate, FF_2), next_token),
    "soft_maximum": partial(computed, (soft_maximum, FF, soft_maximum, FF), next_token),
    "mix": partial(computed, (mix, FF, mix, FF), next_token),
    "two_mixtures": partial(computed, (SIGMOID, PLAIN, FF, SIGMOID), next_token),
    "corrected_sizes": partial(computed, (SIGMOID, BIASED, EIGHT, BIASED), next_token),
}
