"""Transformer Engine's modules in place of torch's and megatron-core's, with equal parameters by name and shape.

Each has the arguments and results of what it stands for, so a checkpoint does not depend on the backend. Transformer
Engine is imported when a module is built by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn


def engine_attention() -> Any:
    """Return the class of the core of attention. With context parallelism, keys and values go around a ring."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    return TEDotProductAttention


class GroupedLayers:
    """Products of tokens, sorted by expert, by the weights of all local experts, which stay their own parameters.

    It is no module: the weights have one name each, that of the expert. adds_gradients: to the buffers of DDP.
    """

    def __init__(self, layers: Sequence[nn.Module], *, adds_gradients: bool) -> None:
        import transformer_engine.pytorch as te

        weight = layers[0].weight
        out_features, in_features = weight.shape
        self.grouped = te.GroupedLinear(
            len(layers),
            in_features,
            out_features,
            bias=False,
            fuse_wgrad_accumulation=adds_gradients,
            params_dtype=weight.dtype,
            device="meta",
        )

    def __call__(self, x: Tensor, ends: Tensor, counts: Tensor, weights: list[Tensor]) -> Tensor:
        """Return tokens [n, k] times weights [m, k]: the first `counts[0]` times the first weight, and so on."""
        for i, weight in enumerate(weights):
            self.grouped._parameters[f"weight{i}"] = weight
        out: Tensor = self.grouped(x, counts.tolist())
        return out
