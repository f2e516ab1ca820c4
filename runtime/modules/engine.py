"""Transformer Engine's modules in place of torch's and megatron-core's, with equal parameters by name and shape.

Each has the arguments and results of what it stands for, so a checkpoint does not depend on the backend. Transformer
Engine is imported when a module is built by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


def engine_attention() -> Any:
    """Return the class of the core of attention. With context parallelism, keys and values go around a ring."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    return TEDotProductAttention


@cache
def narrow_linears() -> tuple[type[nn.Module], type[nn.Module]]:
    """Return the classes of column- and row-parallel linear layers whose products are in fp8, with one scale a tensor.

    Weights stay in bf16: each step casts them once for all its micro-batches. The context is entered by each layer, so
    layers that the backward pass recomputes compute in fp8 too.
    """
    import transformer_engine.pytorch as te
    from megatron.core.extensions import transformer_engine as extensions
    from transformer_engine.common.recipe import Float8CurrentScaling

    recipe = Float8CurrentScaling()

    class Column(extensions.TEColumnParallelLinear):  # type: ignore[misc]  # it has no types
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
            with te.autocast(enabled=True, recipe=recipe):
                return super().forward(x)  # type: ignore[no-any-return]

    class Row(extensions.TERowParallelLinear):  # type: ignore[misc]
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
            with te.autocast(enabled=True, recipe=recipe):
                return super().forward(x)  # type: ignore[no-any-return]

    return Column, Row


def cast_weights_anew(chunks: Sequence[nn.Module]) -> None:
    """Let each layer in fp8 cast its weights in its next forward pass; the passes after it use that cast.

    megatron-core's schedules do so only where its configuration, which other layers read too, has fp8. Without it a run
    trains on the casts of its first weights.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "is_first_microbatch"):
                module.is_first_microbatch = True


class GroupedLayers:
    """One linear layer of each local expert, whose products are computed together. Each keeps its own weight.

    It is no module: the weights have one name each, that of the expert. adds_gradients: to the buffers of DDP.
    """

    def __init__(self, layers: Sequence[nn.Module], *, adds_gradients: bool) -> None:
        import transformer_engine.pytorch as te

        weight = layers[0].weight
        out_features, in_features = weight.shape
        self.layers = layers
        self.grouped = te.GroupedLinear(
            len(layers),
            in_features,
            out_features,
            bias=False,
            fuse_wgrad_accumulation=adds_gradients,
            params_dtype=weight.dtype,
            device="meta",
        )

    def __call__(self, x: Tensor, ends: Tensor, counts: Tensor) -> Tensor:
        """Return tokens [n, k] times weights [m, k]: the first `counts[0]` times the first weight, and so on."""
        for i, layer in enumerate(self.layers):  # whose weights sharding replaces
            self.grouped._parameters[f"weight{i}"] = layer.weight
        out: Tensor = self.grouped(x, counts.tolist())
        return out

    def biases(self) -> Tensor | None:
        """Return the biases [experts, m], if there are any."""
        biases = [layer.bias for layer in self.layers]
        return None if biases[0] is None else torch.stack(biases)
