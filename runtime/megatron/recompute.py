"""Selective recompute: nodes, norms and parts of a body that the backward pass computes again.

`SelectiveNodes.of(nodes, modules)` selects nodes of a model chunk; `SelectiveRecompute.run` runs one node. A whole node
is recomputed from its inputs. A norm's output is freed once the layers that read it have run, and recomputed before the
first of them goes backward; `DiscardedOutput` does this for any function. megatron-core itself recomputes the core of
attention and the shared experts (see `build_context`), a body its own parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from attrs import define, field, frozen
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from torch import Tensor

from megaloom.dsl import Node
from megaloom.dsl.facts.primitives import program
from megaloom.dsl.facts.recompute import modules_of_node
from megaloom.dsl.facts.saved import saved_parts
from megaloom.planner.contract.choices import Module


@frozen
class SelectiveNodes:
    """Names of the nodes of a model chunk that are recomputed, and of the norms whose output is freed."""

    recomputed: frozenset[str]
    norm_readers: dict[str, frozenset[str]]  # for each norm, the layers that read it

    @classmethod
    def of(cls, nodes: Iterable[Node], modules: Iterable[Module]) -> SelectiveNodes:
        """Select the nodes that these recompute modules cover."""
        nodes, selected = tuple(nodes), frozenset(modules)
        norms = {n.name for n, part in saved_parts(nodes) if part.norm} if Module.LAYERNORM in selected else set()
        return cls(
            frozenset(n.name for n in nodes if selected & modules_of_node(program(n))),
            {name: frozenset(n.name for n in nodes if name in n.inputs) for name in norms},
        )


@define(eq=False)
class SelectiveRecompute:
    """One forward pass through the nodes of a model chunk."""

    nodes: SelectiveNodes
    discarded: dict[str, DiscardedOutput] = field(factory=dict)  # by norm
    reader_outputs: dict[str, list[Tensor]] = field(factory=dict)  # outputs of the layers that have read the norm

    def run(self, node: Node, module: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return the output of a node's module, and free a norm's output when its last reader has run."""
        if not torch.is_grad_enabled():
            return module(*inputs)
        if node.name in self.nodes.norm_readers:
            self.discarded[node.name] = DiscardedOutput()
            (out,) = self.discarded[node.name].run(lambda *x: (module(*x),), *inputs)
        elif node.name in self.nodes.recomputed:
            out = tensor_parallel.checkpoint(module, False, *inputs)
        else:
            out = module(*inputs)
        for name in (name for name in node.inputs if name in self.discarded):
            self.reader_outputs.setdefault(name, []).append(out)
            if len(self.reader_outputs[name]) == len(self.nodes.norm_readers[name]):
                self.discarded.pop(name).free_after(*self.reader_outputs.pop(name))
        return out


class DiscardedOutput:
    """Outputs of a function that are freed after they were read, and recomputed before a backward pass needs them."""

    def __init__(self) -> None:
        self.checkpoint = CheckpointWithoutOutput(fp8=None)

    def run(self, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of the function; autograd saves only its inputs."""
        out: Any = self.checkpoint.checkpoint(function, *inputs)
        return tuple(out)

    def free_after(self, *readers: Tensor) -> None:
        """Free the outputs, and recompute them when the gradient of any of `readers` arrives.

        `readers` must be everything that was computed from the outputs.
        """
        for x in readers:
            self.checkpoint.discard_output_and_register_recompute(x)


def recomputed(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """Return the function's result; the backward pass saves only the arguments and runs it again.

    The function must read no other tensors that need gradients, and draw no random numbers.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    out: Tensor = _Recomputed.apply(function, *args)  # type: ignore[no-untyped-call]
    return out


class _Recomputed(torch.autograd.Function):
    """A function of tensors that saves its arguments only.

    Unlike `torch.utils.checkpoint`, the forward pass runs without gradients, so that compiled kernels write no
    intermediate results, and it has no hooks for saved tensors, which cost the host time.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *args: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*args)
        return function(*args)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        needed = ctx.needs_input_grad[1:]
        args = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            out = ctx.function(*args)
        found = iter(torch.autograd.grad(out, [x for x in args if x.requires_grad], gradient))
        return None, *(next(found) if need else None for need in needed)
