"""The closed set of kinds of work, and its sizes. An op names a kind of work, and the planner prices kinds."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING

from attrs import frozen

from .dims import Dim

if TYPE_CHECKING:
    from .value import Value


class WorkKind(StrEnum):
    """Kind of the kernel that computes an op. All but products, attention and scans are memory-bound.

    The gradient of a product takes as many FLOPs for each argument that has one as the forward pass. That of an
    attention core or a scan takes twice the forward pass.
    """

    NONE = "none"  # the tensor is there already, or has no more than a number for each token
    PRODUCT = "product"
    ATTENTION = "attention"
    SCAN = "scan"
    TRIANGULAR_SCAN = "triangular scan"  # its state corrects itself: a triangular system for each chunk of positions
    CONVOLUTION = "convolution"
    POINTWISE = "pointwise"
    DROPOUT = "drop"
    NORM = "normalize"
    ROTARY = "rope"
    CROSS_ENTROPY = "cross-entropy"  # inside a layer
    LOGITS_LOSS = "cross-entropy of logits"  # of a model's logits, counted with the layer that computes them
    GATE = "gate"  # of a mixture of experts
    DISPATCH = "route"  # tokens to their experts, with the all-to-all over ep
    COMBINE = "combine"  # their results back, with the all-to-all over ep
    MEMORY = "memory"  # any other kernel: it reads its arguments and writes its result once

    @property
    def has_flops(self) -> bool:
        """True if arithmetic can take longer than memory traffic."""
        return self is WorkKind.PRODUCT or (self.is_core and self is not WorkKind.CONVOLUTION)

    @property
    def is_core(self) -> bool:
        """True for kernels that mix positions: attention cores, scans and convolutions."""
        return self is WorkKind.ATTENTION or self.is_scan or self is WorkKind.CONVOLUTION

    @property
    def is_scan(self) -> bool:
        """True if it passes a state from position to position."""
        return self in (WorkKind.SCAN, WorkKind.TRIANGULAR_SCAN)

    @property
    def is_exchange(self) -> bool:
        """True if it moves tokens between the devices of experts."""
        return self in (WorkKind.DISPATCH, WorkKind.COMBINE)


@frozen
class Extents:
    """Dims of work that has FLOPs.

    A product is `count` products of [m, k] with [k, n]. Attention has `count` heads of m queries, n keys and k
    channels. A scan has `count` heads of m positions, n states and k channels.
    """

    count: tuple[Dim, ...] = ()
    m: tuple[Dim, ...] = ()
    n: tuple[Dim, ...] = ()
    k: tuple[Dim, ...] = ()


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


Elements = Callable[["Value"], int]  # the elements of a tensor on one device
