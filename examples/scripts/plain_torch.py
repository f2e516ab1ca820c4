"""The oracle of the scripts that compare training: transformers' models and torch's AdamW, on one process."""

import email
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaloom.runtime import Recipe

Batch = dict[str, Tensor]
LossOf = Callable[[Any, Batch], Tensor]
Step = tuple[float, float]  # loss, and gradient norm before clipping


def batches(steps: int, batch: int, seq: int) -> list[Batch]:
    """Return global batches of bytes of Python's own source text: tokens, and labels, the next tokens [batch, seq]."""
    source = bytearray(b"".join(path.read_bytes() for path in sorted(Path(email.__path__[0]).glob("*.py"))))
    rows = torch.frombuffer(source, dtype=torch.uint8)[: steps * batch * (seq + 1)].long()
    return [{"tokens": x[:, :-1], "labels": x[:, 1:]} for x in rows.view(steps, batch, seq + 1)]


def share(batch: Batch, rank: int, ranks: int) -> Batch:
    """Return the rows of a global batch that belong to a data-parallel rank."""
    return {name: x.chunk(ranks)[rank] for name, x in batch.items()}


def next_token(model: Any, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of the next token."""
    logits = model(input_ids=batch["tokens"]).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def adamw(model: Any, recipe: Recipe) -> torch.optim.Optimizer:
    """Return AdamW with the options of a recipe. Norms and biases have no weight decay."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.lr or 0.0, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps)


def train(
    model: Any,
    data: Iterable[Batch],
    recipe: Recipe,
    loss_of: LossOf = next_token,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[Step]:
    """Return loss and gradient norm of each step, with a constant learning rate.

    optimizer: that of the steps before, or a new one.
    """
    optimizer, found = optimizer or adamw(model, recipe), []
    for batch in data:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_grad)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found


def differ(found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> float:
    """Return the largest relative difference between numbers of two lists of equal lengths."""
    a, b = (torch.tensor(x, dtype=torch.float64) for x in (found, expected))
    return float(((a - b).abs() / b.abs()).max()) if a.shape == b.shape else float("inf")
