"""Memory traffic of ops that torch runs one by one: the elements that their kernels read and write.

A layer that runs by its body has no fused chains. `traffic` counts what one primitive adds, forward and backward, from
its evaluation in torch and the formulas of its gradient.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from megaloom.dsl.ops.norm import Normalize
from megaloom.dsl.ops.rope import Rope
from megaloom.dsl.ops.sequence import Conv
from megaloom.dsl.ops.shape import Concat
from megaloom.dsl.ops.weight import Weight
from megaloom.dsl.value import Affine, Clamp, Pointwise, Value

from .primitives import Program, Step

COPY, SUM = 2, 3  # passes over a tensor: read and write; read two and write one
# Passes of functions of one argument, forward and backward: one kernel each, but for these. The gradient of a
# reciprocal is a negation and two products.
UNARY_PASSES, COMPOSED_PASSES = (2, 3), {"quick_gelu": (7, 14), "relu2": (4, 8), "reciprocal": (2, 7)}
AFFINE_PASSES = (4, 2)  # a product and a sum; the gradient is scaled
# Of rotated channels, as halves: four products, a sum and a difference, and both halves joined. Backward: the gradient
# of each, a negation, and the sums of two gradients of each half.
ROPE_PASSES = (9, 10)
NORM_PASSES = (2, 5)  # backward one kernel for the input, one for the weights
SCALE_PASSES = (2, 6)  # a product with a small tensor: the gradient of both, and the sum of the latter


@frozen
class Traffic:
    """Elements that the kernels of an op read and write, and the number of kernels, forward and backward."""

    forward: int = 0
    backward: int = 0
    forward_kernels: int = 0
    backward_kernels: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.forward + other.forward,
            self.backward + other.backward,
            self.forward_kernels + other.forward_kernels,
            self.backward_kernels + other.backward_kernels,
        )


def is_separate(v: Value) -> bool:
    """Return True if `traffic` counts all kernels of a primitive."""
    return isinstance(v.op, Pointwise | Affine | Clamp | Rope | Concat | Conv | Normalize)


def traffic(p: Program, step: Step, elements: Callable[[Value], int]) -> Traffic:
    """Return the traffic of a primitive, and of the sums of gradients and changes of order around it.

    elements: of a tensor on one device.
    """
    v = step.value
    out = _kernels(v, elements) if is_separate(v) else Traffic()
    inputs = {id(x.source) for x in p.inputs}
    for a in {id(a.source): a for a in v.args if not isinstance(a.op, Weight) and id(a.source) not in p.data}.values():
        n = elements(a)
        if p.first_readers[id(a.source)] is not step:
            out += Traffic(0, SUM * n, 0, 1)  # gradients of all readers add up
        elif id(a.source) in inputs:  # to batch and sequence, from megatron-core's sequence and batch
            out += Traffic(COPY * n, COPY * n, 1, 1)
    if v is p.value.source:
        out += Traffic(COPY * elements(v), COPY * elements(v), 1, 1)
    return out


def _kernels(v: Value, elements: Callable[[Value], int]) -> Traffic:
    """Return the traffic of the kernels of one op."""
    n = elements(v)
    match v.op:
        case Pointwise("add" | "mul"):
            return _combination(v, n, elements)
        case Pointwise("div"):
            return _quotient(n, *map(elements, v.args))
        case Pointwise(name):
            forward, backward = COMPOSED_PASSES.get(name, UNARY_PASSES)
            return Traffic(forward * n, backward * n, forward // COPY, backward // COPY)
        case Clamp():
            return Traffic(UNARY_PASSES[0] * n, UNARY_PASSES[1] * n, 1, 1)
        case Affine():
            return Traffic(AFFINE_PASSES[0] * n, AFFINE_PASSES[1] * n, 2, 1)
        case Rope():
            channels = v.shape["head_dim"].known
            rotated = n * v.op.rotated_channels(v.shape) // channels
            forward, backward = (passes * rotated + COPY * n for passes in ROPE_PASSES)
            return Traffic(forward, backward, 8, 11)
        case Concat():
            parts = sum(map(elements, v.args))
            return Traffic(parts + n, COPY * n, 1, len(v.args))
        case Conv():
            width = v.args[1].shape["width"].known
            once = COPY * n + SUM * n * (width - 1)
            return Traffic(once, once + (SUM + 1) * n * width, width, 3 * width)
        case _:
            norm = Traffic(NORM_PASSES[0] * n, NORM_PASSES[1] * n, 1, 2)
            grouped = isinstance(v.op, Normalize) and v.op.groups > 1
            return norm + Traffic(SCALE_PASSES[0] * n, SCALE_PASSES[1] * n, 1, 3) if grouped else norm


def _combination(v: Value, n: int, elements: Callable[[Value], int]) -> Traffic:
    """Return the traffic of sums or products of two or more tensors, of which some are broadcast."""
    sizes, product = [elements(a) for a in v.args], v.op.fn == "mul"  # type: ignore[attr-defined]
    kernels = len(sizes) - 1
    out = Traffic(2 * kernels * n + sum(sorted(sizes)[:kernels]), 0, kernels, 0)
    for size in sizes:
        if product:
            out += Traffic(0, 2 * n + sum(sizes) - size, 0, 1)
        if size < n:  # the gradient of a tensor that is broadcast is summed
            out += Traffic(0, n + size, 0, 1)
    return out


def _quotient(n: int, x: int, y: int) -> Traffic:
    """Return the traffic of a quotient with n elements of tensors with x and y elements, of which one may be broadcast.

    The gradient of the dividend is a quotient; that of the divisor two, a negation and a product.
    """
    reads, kernels = (n + y) + (x + y + n + y) + n + 2 * n, 5
    sums = sum(n + size for size in (x, y) if size < n)  # the gradient of a tensor that is broadcast is summed
    return Traffic(x + y + n, reads + kernels * n + sums, 1, kernels + (x < n) + (y < n))
