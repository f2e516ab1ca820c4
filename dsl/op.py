"""The protocol of an op: all that facts, rules, prices and decoding know about it, stated by the op itself.

An op that leaves a statement out is an error when its class is declared. `base_ops` answers most of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attrs import frozen

from .dims import DType, Shape, Sizes
from .errors import ShapeError
from .sharding_table import SEQUENCES
from .work_kinds import Elements, Extents, Traffic, WorkKind

if TYPE_CHECKING:
    from .value import Value


@frozen
class Reads:
    """The dims along which an op reads more of one argument than the element at the indices of its result.

    Nothing of it is about a layout: propagation derives from it what devices exchange.

    whole: dims of which an element of the result depends on other indices than its own, or on all. If such a dim is
    sharded, the argument is gathered along it.
    keys: those of `whole` that are no dims of the result, because it is computed for the dims of other arguments, as
    attention is for its queries.
    offset: dims of which it must know the index at which a shard begins. located: over cp, its torch code knows that.
    summed: dims that it sums over, and in which it is linear: the terms of shards add up.
    statistics: dims over which its torch code reduces by itself: devices exchange statistics by `exchanges`
    all-reduces.
    groups: (number, dims): these dims of `whole`, taken together, are in equal groups, and an element reads its own.
    heads: (dim, number of heads): so many heads share the indices of this dim.
    renamed: (old, new): the dim `old` of the argument is the dim `new` of the result.
    rows: it reads as many elements as it writes, of rows that indices select.
    """

    whole: frozenset[str] = frozenset()
    keys: bool = False
    offset: frozenset[str] = frozenset()
    located: bool = False
    summed: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()
    exchanges: int = 0
    groups: tuple[int, tuple[str, ...]] | None = None
    heads: tuple[str, int] | None = None
    renamed: tuple[str, str] | None = None
    rows: bool = False

    @property
    def mixed(self) -> frozenset[str]:
        """Return the dims along which an element of the result depends on several indices."""
        return self.whole | frozenset(self.summed) | frozenset(self.statistics)

    def __bool__(self) -> bool:
        return bool(self.whole or self.offset)


PLAIN = Reads()


@frozen
class Decoding:
    """The way in which an op computes the next position of a sequence, after the earlier ones.

    state: it needs tensors of earlier positions, which its torch code keeps: keys and values, last inputs, a state.
    position: it needs the index of the position. refusal: why it cannot; empty if it can.
    """

    state: bool = False
    position: bool = False
    refusal: str = ""


ALONE = Decoding()  # each position by itself
ALL_POSITIONS = Decoding(refusal="reads all tokens at once")


class Op:
    """A function from values to a value: a primitive, or a layer made of primitives.

    A primitive is a frozen attrs class that states `shape`, `reads`, `work_kind`, `saved_values`, and where its kind
    has FLOPs, `flops` and `extents`. A base class of `megaloom.dsl.base_ops` states most of it. What is not stated is
    an error when the class is declared. docs/guide/own-layer.md says how to write the torch code of a primitive.
    """

    work_kind: ClassVar[WorkKind]
    elementwise: ClassVar[bool] = False  # each output element depends on one element of each argument
    arity: ClassVar[int | None] = None  # the number of arguments; None: `shape` checks it
    ignores_padding: ClassVar[bool] = False  # numbers in the padding of a dim change no others
    channelwise: ClassVar[bool] = False  # it treats each channel alone, along its sequence: cp may exchange the two
    base_class: ClassVar[bool] = True  # a class that says so itself is a base class, which may leave statements out

    def __init_subclass__(cls) -> None:
        if "base_class" in vars(cls):
            return
        due = ["shape", "reads", "work_kind", "saved_values"]
        due += ["flops", "extents"] * getattr(cls, "work_kind", WorkKind.NONE).has_flops
        missing = [name for name in due if getattr(cls, name, None) is getattr(Op, name, None)]
        if missing:
            raise ShapeError(
                f"{cls.__name__} does not state {', '.join(missing)}: an op says along which dims it reads, what kind "
                "of work it is and what it saves\nstate them, or derive it from a class of megaloom.dsl.base_ops: "
                "Elementwise, Contraction, AlongSequence, GroupedScan, TableLookup or Rearrangement"
            )

    def shape(self, *args: Shape) -> Shape:
        """Return the shape of the result. Raises ShapeError if the arguments do not fit."""
        raise NotImplementedError

    def dtype(self, *args: DType) -> DType:
        """Return the element type of the result. Raises ShapeError if an argument has the wrong element type."""
        if DType.INDEX in args:
            raise ShapeError(f"{self} does not accept token ids: turn them into vectors first, with Embed(table)")
        return DType.COMPUTE

    def reads(self, out: Value) -> tuple[Reads, ...]:
        """Return what the op reads of each of its arguments."""
        raise NotImplementedError

    def flops(self, out: Shape, args: tuple[Shape, ...], size: Sizes) -> int:
        """Return the FLOPs of the forward pass; a multiply-add is two. Memory-bound work counts none."""
        return 0

    def extents(self, out: Value) -> Extents:
        """Return the dims of work that has FLOPs."""
        return Extents()

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        """Return the values that the backward pass reads."""
        raise NotImplementedError

    def saved_by_torch(self, out: Value) -> tuple[Value, ...]:
        """Return the values that the backward pass reads where torch runs the op by itself, outside of a chain."""
        return self.saved_values(out)

    def saved_buffers(self, out: Value) -> tuple[tuple[str, Shape, DType], ...]:
        """Return other tensors that the backward pass reads (masks, statistics): (name, shape, element type)."""
        return ()

    def torch_traffic(self, out: Value, elements: Elements) -> Traffic | None:
        """Return the memory traffic of the kernels by which torch runs the op by itself, outside of a chain.

        None: one kernel, which is priced by its kind. elements: of a tensor on one device.
        """
        return None

    def decoding(self, out: Value, along: str) -> Decoding:
        """Return how the op computes the next position along a dim. Positions that it mixes refuse it."""
        reads = self.reads(out)
        if any(along in r.mixed for r in reads):
            return ALL_POSITIONS
        if any(along in r.offset for r in reads):
            return Decoding(refusal=f"has the op {type(self).__name__}, which reads the index of a position")
        return ALONE

    def mixes_documents(self, out: Value) -> bool:
        """Return whether a token of a packed sequence would read tokens of other documents."""
        return any(SEQUENCES & r.mixed for r in self.reads(out))
