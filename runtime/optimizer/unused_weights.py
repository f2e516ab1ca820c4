"""Weights that the loss of some ranks leaves out: their unit reduces zeros there, so that all ranks reduce equal sizes.

Steps of a user's own choose what they read of a model's outputs, and ranks may choose differently. A unit of which no
weight is read is reduced in its turn all the same: torch's FSDP gives each input of the unit after it a gradient.
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FSDPModule

from megaloom.dsl import UserError
from megaloom.runtime.modules.model_chunk import ModelChunk

REDUCES_UNUSED = "set_reduce_scatter_unused_params"  # a method of units, in torch 2.13


def reduce_unused(root: FSDPModule) -> None:
    """Let units reduce zeros for weights without a gradient, if this torch can."""
    if hasattr(root, REDUCES_UNUSED):
        getattr(root, REDUCES_UNUSED)(True)


def check_outputs(chunk: ModelChunk) -> None:
    """Raise UserError if outputs are computed from different weights, and this torch does not reduce zeros."""
    if hasattr(FSDPModule, REDUCES_UNUSED) or len(set(_reached_nodes(chunk))) < 2:
        return
    raise UserError(
        "the outputs that a step of your own may read are computed from different weights; where ranks leave out some, "
        f"sharded weights need torch 2.13, and this is {torch.__version__}\nuse --shard optimizer, or update torch"
    )


def _reached_nodes(chunk: ModelChunk) -> list[frozenset[str]]:
    """Return for each value that a model chunk returns the nodes with trained weights that it is computed from."""
    found: dict[str, frozenset[str]] = {}
    for node, _ in chunk.node_modules():
        own = {node.name} if any(slot.trained for slot in node.weights) else set()
        found[node.name] = frozenset(own).union(*(found.get(name, frozenset()) for name in node.inputs))
    return [found[name] for name in chunk.writes]
