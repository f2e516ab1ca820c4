"""Runs of an op's function on the shards of one dim, as the runtime runs it, and comparison with the whole tensors."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import torch
from attrs import frozen
from torch import Tensor

from megaloom.dsl.op import Reads
from megaloom.runtime.ops.tensors import dim_index

from .small_case import SmallCase

TOLERANCE, ROUNDING = 1e-5, 1e-6  # of the largest element, and of 1: a function may compute in 32 bits
GARBAGE = (1e6, float("nan"))  # numbers that the padding of a dim may have


class Read(Enum):
    """A part of an argument along one dim, given to an op: its shard, all of it, or zeros around its shard."""

    SHARD = auto()
    WHOLE = auto()
    ZEROS = auto()


@frozen(eq=False)
class ShardRuns:
    """The runs of an op over shards of one dim of its result, or of its arguments alone.

    names, dims: the name and the index of the dim in each argument; None in one that lacks it. out: its index in the
    result, if it has it.
    summed: the results of shards are terms of a sum. computed_whole: the result of a shard has the whole dim.
    """

    case: SmallCase
    name: str
    names: tuple[str | None, ...]
    dims: tuple[int | None, ...]
    out: int | None
    reads: tuple[Read, ...]
    summed: bool
    computed_whole: bool

    @classmethod
    def of(cls, case: SmallCase, reads: Sequence[Reads], name: str) -> ShardRuns:
        """Return the runs over the dim `name`, of an argument under its old name if that is renamed."""
        shape = case.value.shape
        own = [_own_name(r, a.shape.names, name) for r, a in zip(reads, case.value.args, strict=True)]
        pairs = list(zip(reads, own, strict=True))
        gathered = any((n in r.whole and not r.keys) or n in r.offset for r, n in pairs if n)
        rest = Read.ZEROS if gathered else Read.SHARD
        return cls(
            case=case,
            name=name,
            names=tuple(own),
            dims=tuple(dim_index(a.shape, n) if n else None for n, a in zip(own, case.value.args, strict=True)),
            out=dim_index(shape, name) if name in shape else None,
            reads=tuple(
                Read.WHOLE if n is None or n in r.whole else Read.ZEROS if n in r.offset else rest for r, n in pairs
            ),
            summed=any(n in r.summed for r, n in pairs if n),
            computed_whole=gathered,
        )

    @property
    def is_gathered(self) -> bool:
        """Return whether each device computes the whole result from whole arguments: there is nothing to compare."""
        whole = all(read is Read.WHOLE for read in self.reads)
        return whole and (self.computed_whole or self.out is None or all(i is None for i in self.dims))

    @property
    def size(self) -> int:
        """Return the size of the dim; 0 if the arguments and the result have different ones."""
        sizes = {x.shape[i] for x, i in zip(self.case.tensors, self.dims, strict=True) if i is not None}
        sizes |= set() if self.out is None else {self.case.result.shape[self.out]}
        return sizes.pop() if len(sizes) == 1 else 0

    @property
    def is_padded(self) -> bool:
        """Return whether a layout may pad the dim, and the op reads the padding."""
        owners = (*self.case.value.args, self.case.value)
        dims = [v.shape.dims[i] for v, i in zip(owners, (*self.dims, self.out), strict=True) if i is not None]
        read = any(i is not None and r is not Read.SHARD for i, r in zip(self.dims, self.reads, strict=True))
        return read and all(d.size is not None for d in dims)

    def problem(self) -> str:
        """Return how shards are computed wrongly; empty if they are not. Raise what the function raises."""
        if self.size == 0:
            return f"its arguments and its result have different sizes of {self.name}"
        shards = [r for i, r in zip(self.dims, self.reads, strict=True) if i is not None and r is not Read.WHOLE]
        if self.out is None and not self.summed and shards and self.name != "batch":
            return "the result lacks that dim"
        return self.wrong_result() or self.wrong_gradient() if self.size > 1 else ""

    def holds(self) -> bool:
        """Return whether shards are computed rightly."""
        try:
            return not self.problem()
        except Exception:  # of the function, on shards
            return False

    def halves(self) -> tuple[Tensor, Tensor]:
        """Return two shards that have all indices: the even and the odd ones."""
        return torch.arange(0, self.size, 2), torch.arange(1, self.size, 2)

    def run(self, at: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """Return what the function makes of the shard with these indices, as the runtime then uses it."""
        y = self.case.run(*(self._given(x, i, r, at) for x, i, r in zip(tensors, self.dims, self.reads, strict=True)))
        return y.index_select(self.out, at) if self.computed_whole and self.out is not None and not self.summed else y

    def expected(self, at: Tensor) -> Tensor:
        """Return what the run of a shard must give, unless the results of shards are terms of a sum."""
        return self.case.result if self.out is None else self.case.result.index_select(self.out, at)

    def wrong_result(self) -> str:
        """Return how the results of shards differ from the shards of the result; empty if they do not."""
        first, middle = torch.tensor([0]), torch.tensor([self.size // 2])
        with torch.no_grad():
            if self.summed:
                return self._wrong_sum()
            for at in (*self.halves(), first, middle):
                if found := differs(self.run(at, self.case.tensors), self.expected(at)):
                    return (
                        f"its function on the indices {at.tolist()} of {self.name} alone gives another result: {found}"
                    )
        return ""

    def _wrong_sum(self) -> str:
        total = sum(self.run(at, self.case.tensors) for at in self.halves())
        assert isinstance(total, Tensor)
        if found := differs(total, self.case.result):
            return f"the results for two shards of {self.name} do not add up to the result: {found}"
        if found := differs(self._padded_result(0.0), self.case.result):
            return f"zeros that pad {self.name} change the result: {found}"
        return ""

    def wrong_padding(self) -> str:
        """Return how numbers in the padding of the dim change the result; empty if they do not."""
        with torch.no_grad():
            for number in GARBAGE:
                if found := differs(self._padded_result(number), self.case.result):
                    return f"numbers in the padding of {self.name}, such as {number:g}, change the result: {found}"
        return ""

    def _padded_result(self, number: float) -> Tensor:
        """Return the result of arguments whose dim has two more indices, without those indices."""
        tensors = (
            x if i is None else torch.cat((x, torch.full_like(x.narrow(i, 0, 2), number)), i)
            for x, i in zip(self.case.tensors, self.dims, strict=True)
        )
        y = self.case.run(*tensors)
        return y if self.out is None else y.narrow(self.out, 0, self.size)

    def wrong_gradient(self) -> str:
        """Return how the gradients of shards, added up, differ from those of the whole; empty if they do not."""
        leaves, y = self.case.leaves(), self.case.result
        trained = [(i, x) for i, x in enumerate(leaves) if x.requires_grad]
        if not trained or not y.is_floating_point() or (self.out is None and not self.summed):
            return ""
        given = torch.arange(y.numel(), dtype=y.dtype).sin().view_as(y)
        expected = _gradients(self.case.run(*leaves), given, [x for _, x in trained])
        total = [torch.zeros_like(x) for x in expected]
        for at in self.halves():
            part = given if self.summed or self.out is None else given.index_select(self.out, at)
            shares = _gradients(self.run(at, leaves), part, [x for _, x in trained])
            total = [a + b for a, b in zip(total, shares, strict=True)]
        for (i, _), a, b in zip(trained, total, expected, strict=True):
            if found := differs(a, b):
                return f"the gradient of argument {i + 1} for two shards of {self.name} is another one: {found}"
        return ""

    def _given(self, x: Tensor, dim: int | None, read: Read, at: Tensor) -> Tensor:
        """Return an argument as the runtime gives it to the device that has these indices of the dim."""
        if read is Read.WHOLE or dim is None:
            return x
        if read is Read.SHARD:
            return x.index_select(dim, at)
        inside = torch.zeros(x.shape[dim], dtype=torch.bool)
        inside[at] = True
        return x * inside.view([-1 if k == dim else 1 for k in range(x.ndim)])


def differs(found: Tensor, expected: Tensor) -> str:
    """Return how two tensors differ by more than rounding; empty if they do not."""
    if found.shape != expected.shape:
        return f"it has the sizes {list(found.shape)} instead of {list(expected.shape)}"
    a, b = found.double(), expected.double()
    if not a.numel():
        return ""
    error = float((a - b).abs().nan_to_num(nan=float("inf")).max())
    return f"they differ by {error:.1e}" if error > TOLERANCE * float(b.abs().max()) + ROUNDING else ""


def _gradients(y: Tensor, given: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of the leaves; zeros for one that a result does not depend on."""
    if not y.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    found = torch.autograd.grad(y, leaves, given.to(y.dtype), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]


def _own_name(reads: Reads, names: Sequence[str], name: str) -> str | None:
    """Return the name that an argument has for a dim of the result; None if it lacks the dim."""
    old, new = reads.renamed or (None, None)
    if name == new and old in names:
        return old
    return name if name in names and name != old else None
