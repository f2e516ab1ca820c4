"""Base classes of ops, which answer most of an op's protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attrs import frozen

from .dims import Shape, Sizes
from .errors import ShapeError
from .op import PLAIN, Decoding, Op, Reads
from .work_kinds import Elements, Extents, Traffic, WorkKind

if TYPE_CHECKING:
    from .value import Value

COPY, SUM = 2, 3  # passes over a tensor: read and write; read two and write one
UNARY_PASSES = (2, 3)  # of a function of one argument, forward and backward: one kernel each


@frozen
class GivenTensor(Op):
    """A tensor that is given: an input of the model, or a weight."""

    base_class: ClassVar[bool] = True
    work_kind: ClassVar[WorkKind] = WorkKind.NONE
    ignores_padding: ClassVar[bool] = True

    def shape(self, *args: Shape) -> Shape:
        raise ShapeError(f"{self} is given: it cannot be applied to values")

    def reads(self, out: Value) -> tuple[Reads, ...]:
        return ()

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return ()


@frozen
class Elementwise(Op):
    """An op whose result at each index depends on its arguments at this index only: [..] to [..].

    Arguments are broadcast over the dims that they lack. It states `saved_values`.
    """

    base_class: ClassVar[bool] = True
    work_kind: ClassVar[WorkKind] = WorkKind.MEMORY
    elementwise: ClassVar[bool] = True
    ignores_padding: ClassVar[bool] = True

    def shape(self, *args: Shape) -> Shape:
        big = max(args, key=lambda s: len(s.dims))
        for s in args:
            for d in s:
                if d.name not in big:
                    raise ShapeError(f"cannot {self} {s} and {big}: neither has all the dims of the other")
                if big[d.name] != d:
                    raise ShapeError(f"cannot {self} {s} and {big}: {d} is not {big[d.name]}")
        return big

    def reads(self, out: Value) -> tuple[Reads, ...]:
        return (PLAIN,) * len(out.args)

    def torch_traffic(self, out: Value, elements: Elements) -> Traffic | None:
        n = elements(out)
        return Traffic(UNARY_PASSES[0] * n, UNARY_PASSES[1] * n, 1, 1)


@frozen
class Contraction(Op):
    """An op that is linear in each argument and sums over the dims `over`. It states the rest.

    The sums of shards of such a dim add up to the result.
    """

    over: tuple[str, ...]
    base_class: ClassVar[bool] = True
    ignores_padding: ClassVar[bool] = True

    def reads(self, out: Value) -> tuple[Reads, ...]:
        return (Reads(summed=self.over),) * len(out.args)


@frozen
class AlongSequence(Op):
    """An op that reads other positions of the dim `along`, such as a scan. It states the rest.

    It mixes positions, so it is refused where several documents share a sequence.
    """

    along: str
    base_class: ClassVar[bool] = True

    def reads(self, out: Value) -> tuple[Reads, ...]:
        return (Reads(whole=frozenset({self.along})),) * len(out.args)


@frozen
class GroupedScan(AlongSequence):
    """An op that passes a state from position to position, for each head: [batch seq heads head_dim] to an equal shape.

    The state of a head is [state head_dim]. Arguments with `groups` are shared by the heads of a group; the fourth has
    the dim `state`. It states `shape`, the kind of scan and what it saves.
    """

    along: str = "seq"
    base_class: ClassVar[bool] = True
    channelwise: ClassVar[bool] = True

    def reads(self, out: Value) -> tuple[Reads, ...]:
        along, heads = frozenset({self.along}), ("groups", out.shape["heads"].known)
        return tuple(Reads(along, heads=heads if "groups" in a.shape else None) for a in out.args)

    def flops(self, out: Shape, args: tuple[Shape, ...], size: Sizes) -> int:
        """Return 7 FLOPs for each position and element of the state.

        For Mamba-2 this is Megatron-LM's count (num_floating_point_operations). The delta rule has a decay 1, sᵀ k 2, a
        correction 2, and sᵀ q 2.
        """
        return 7 * size(out) * args[3]["state"].known

    def extents(self, out: Value) -> Extents:
        x, state = out.shape, out.args[3].shape["state"]
        return Extents(tuple(x.without(self.along, "head_dim")), (x[self.along],), (state,), (x["head_dim"],))

    def decoding(self, out: Value, along: str) -> Decoding:
        return Decoding(state=along == self.along)


@frozen
class TableLookup(Op):
    """An op that selects rows of a table, its last argument, by the dim `key`. It states `shape` and what it saves."""

    key: str
    base_class: ClassVar[bool] = True
    work_kind: ClassVar[WorkKind] = WorkKind.MEMORY


@frozen
class Rearrangement(Op):
    """An op that moves elements and computes nothing. It states `shape` and `reads`. It saves nothing."""

    base_class: ClassVar[bool] = True
    work_kind: ClassVar[WorkKind] = WorkKind.MEMORY

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return ()
