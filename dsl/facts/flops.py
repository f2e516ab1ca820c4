"""FLOPs of a model, by pass. A FLOP is a multiply or an add."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from megaloom.dsl.graph import Model, graph

from .costs import costs
from .recompute import CORE
from .saved import saved_parts, selected_modules


@frozen
class Flops:
    """FLOPs of each pass. The backward pass is dgrad (for activations), wgrad (for weights) and recompute."""

    forward: int = 0
    dgrad: int = 0
    wgrad: int = 0
    recompute: int = 0

    @property
    def total(self) -> int:
        """Return the model FLOPs of a training step, without recompute; causal attention counts half."""
        return self.forward + self.dgrad + self.wgrad

    @property
    def hardware(self) -> int:
        """Return the hardware FLOPs of a training step, with recompute (arXiv:2205.05198, section 5)."""
        return self.total + self.recompute


def flops(
    model: Model,
    *,
    batch: int,
    seq: int,
    source: int | None = None,
    recompute: str = "none",
    modules: Iterable[str] = CORE,
) -> Flops:
    """Return the FLOPs of a batch of sequences: 2 for each weight and token that it meets, and those of attention.

    source: tokens of each sequence that an encoder reads, `seq` if not given. recompute: none, selective or full.
    modules: what selective recompute recomputes. Raises UserError for sizes below 1 and unknown names.
    """
    selected, nodes = selected_modules(recompute, modules), graph(model).nodes
    work = [(n, w) for n in nodes for w in costs(n, batch=batch, seq=seq, source=source).work]
    parts = saved_parts(nodes, recompute)
    whole = {n.name for n, part in parts if part.recomputed or (part.norm and "layernorm" in selected)}
    return Flops(
        forward=sum(w.flops for _, w in work),
        dgrad=sum(w.dgrad for _, w in work),
        wgrad=sum(w.wgrad for _, w in work),
        recompute=sum(w.flops for n, w in work if n.name in whole or selected & w.recomputed_by),
    )
