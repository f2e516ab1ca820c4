"""Samples of the next token, as the engine asks for them."""

import torch
from torch import Tensor

from megaloom.dsl import Graph


def next_token(text: Tensor) -> dict[str, Tensor]:
    """Return the tokens and labels of a text of one token more: [.., seq + 1] to [.., seq] each."""
    return {"tokens": text[..., :-1], "labels": text[..., 1:]}


def random_text(i: int, vocab: int, seq: int) -> Tensor:
    """Return text i of `seq` + 1 random tokens."""
    return torch.randint(vocab, (seq + 1,), generator=torch.Generator().manual_seed(i))


def with_mask(graph: Graph, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch with a mask of ones, if the model asks for one."""
    return {**batch, "mask": torch.ones_like(batch["labels"])} if "mask" in graph.index else batch
