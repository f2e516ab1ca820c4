"""Modules that the backward pass computes again, as selective recompute asks: whole nodes, norms, parts of a body.

Protocol: `Repeats.of(nodes, modules)` says which nodes of a stage, `Repeating.run` runs one of them. A node is run
again from its inputs. A norm in front of layers is run again before the first of them goes back, as its output, which
they keep, is freed when they are through; `Discarded` does so for any function. The core of attention and the shared
experts of a mixture are megatron-core's to run again (see `context`), parts of a body the body's.
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
class Repeats:
    """Of the nodes of a stage, by name, those that run again, and the norms whose output is freed meanwhile."""

    whole: frozenset[str]
    norms: dict[str, frozenset[str]]  # of each norm, the layers that read it

    @classmethod
    def of(cls, nodes: Iterable[Node], modules: Iterable[Module]) -> Repeats:
        """What these modules are among the nodes of a stage."""
        nodes, made = tuple(nodes), frozenset(modules)
        norms = {n.name for n, part in saved_parts(nodes) if part.norm} if Module.LAYERNORM in made else set()
        return cls(
            frozenset(n.name for n in nodes if made & modules_of_node(program(n))),
            {name: frozenset(n.name for n in nodes if name in n.inputs) for name in norms},
        )


@define(eq=False)
class Repeating:
    """One pass through the nodes of a stage."""

    repeats: Repeats
    waiting: dict[str, Discarded] = field(factory=dict)  # by the norm
    read: dict[str, list[Tensor]] = field(factory=dict)  # what the layers made of it

    def run(self, node: Node, module: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """What a node's module computes of its inputs."""
        if not torch.is_grad_enabled():
            return module(*inputs)
        if node.name in self.repeats.norms:
            self.waiting[node.name] = Discarded()
            (out,) = self.waiting[node.name].run(lambda *x: (module(*x),), *inputs)
        elif node.name in self.repeats.whole:
            out = tensor_parallel.checkpoint(module, False, *inputs)
        else:
            out = module(*inputs)
        for name in (name for name in node.inputs if name in self.waiting):
            self.read.setdefault(name, []).append(out)
            if len(self.read[name]) == len(self.repeats.norms[name]):
                self.waiting.pop(name).free(*self.read.pop(name))
        return out


class Discarded:
    """A function whose outputs are freed once they have been read, and made again before a backward pass needs them."""

    def __init__(self) -> None:
        self.made = CheckpointWithoutOutput(fp8=None)

    def run(self, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs of the function, which keeps nothing but its inputs."""
        out: Any = self.made.checkpoint(function, *inputs)
        return tuple(out)

    def free(self, *after: Tensor) -> None:
        """Free the outputs, until the gradient of any of these is there, which are all that was made of them."""
        for x in after:
            self.made.discard_output_and_register_recompute(x)
