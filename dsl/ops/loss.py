"""Ops of losses: cross-entropy, log-sum-exp, sums, comparison of ids, and the sums that training divides."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from megaloom.dsl.base_ops import Contraction
from megaloom.dsl.dims import Dim, DType, Shape
from megaloom.dsl.errors import ShapeError
from megaloom.dsl.op import PLAIN, Op, Reads
from megaloom.dsl.sharding_table import SEQUENCES
from megaloom.dsl.value import Value, apply
from megaloom.dsl.work_kinds import WorkKind

SUMS = Dim("sums", 2)


@frozen
class CrossEntropy(Op):
    """-log softmax(logits)[label], in nats, in fp32: [.. over] and ids [..] to [..]. Arguments: logits, labels."""

    over: str = "vocab"
    work_kind: ClassVar[WorkKind] = WorkKind.CROSS_ENTROPY
    arity: ClassVar[int] = 2
    ignores_padding: ClassVar[bool] = True

    def shape(self, *args: Shape) -> Shape:
        logits, labels = args
        logits[self.over]
        if logits[self.over].size is None:
            raise ShapeError(f"a cross-entropy is over a dim such as vocab, not over the positions of {self.over}")
        if set(logits.without(self.over)) != set(labels):
            raise ShapeError(
                f"labels {labels} do not fit logits {logits}: they must be {logits.without(self.over)}, one id for each"
            )
        return logits.without(self.over)

    def dtype(self, *args: DType) -> DType:
        if args[1] is not DType.INDEX:
            raise ShapeError("the labels of a cross-entropy must be ids, an input such as labels()")
        super().dtype(args[0])
        return DType.FLOAT32

    def reads(self, out: Value) -> tuple[Reads, ...]:
        """Devices exchange the largest number, the sum of exponentials, and the label's logit.

        Over a sequence a label is the index of a position, which a shard does not know. Source: megatron-core 0.16.1,
        tensor_parallel/cross_entropy.py.
        """
        if self.over in SEQUENCES:
            return Reads(frozenset({self.over})), PLAIN
        return Reads(statistics=(self.over,), exchanges=3), PLAIN

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return out.args


@frozen
class LogSumExp(Op):
    """log(sum(exp(x))) over one dim, in fp32: [.. over] to [..]. It does not overflow."""

    over: str
    work_kind: ClassVar[WorkKind] = WorkKind.MEMORY
    arity: ClassVar[int] = 1
    ignores_padding: ClassVar[bool] = True

    def shape(self, *args: Shape) -> Shape:
        (x,) = args
        x[self.over]
        return x.without(self.over)

    def dtype(self, *args: DType) -> DType:
        super().dtype(*args)
        return DType.FLOAT32

    def reads(self, out: Value) -> tuple[Reads, ...]:
        """Devices exchange the largest number and the sum of exponentials."""
        return (Reads(statistics=(self.over,), exchanges=2),)

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return (*out.args, out)


@frozen
class Sum(Contraction):
    """The sum over the dims `over`, in fp32: [.. over] to [..]."""

    work_kind: ClassVar[WorkKind] = WorkKind.MEMORY
    arity: ClassVar[int] = 1

    def shape(self, *args: Shape) -> Shape:
        (x,) = args
        for name in self.over:
            x[name]
        return x.without(*self.over)

    def dtype(self, *args: DType) -> DType:
        super().dtype(*args)
        return DType.FLOAT32

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return ()


@frozen
class Equals(Op):
    """1 where an id equals `index`, else 0: ids [..] to [..]."""

    index: int
    work_kind: ClassVar[WorkKind] = WorkKind.MEMORY
    arity: ClassVar[int] = 1

    def shape(self, *args: Shape) -> Shape:
        return args[0]

    def dtype(self, *args: DType) -> DType:
        if args[0] is not DType.INDEX:
            raise ShapeError(f"{self} needs ids, an input such as labels()")
        return DType.MASK

    def reads(self, out: Value) -> tuple[Reads, ...]:
        return (PLAIN,)

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return ()


@frozen
class LossSums(Op):
    """The two numbers of a weighted mean: (sum of weights * losses, sum of weights), [..] to [sums=2].

    Arguments: losses [..], then optionally weights, which are broadcast over the dims that they lack; without weights
    each loss counts once. Training adds these sums over micro-batches, dp and cp ranks, then divides. So the mean does
    not depend on the layout.
    """

    work_kind: ClassVar[WorkKind] = WorkKind.NONE

    def shape(self, *args: Shape) -> Shape:
        losses, *weights = args
        if len(weights) > 1:
            raise ShapeError(f"loss_sums takes losses and optionally weights, got {len(args)} values")
        for w in weights:
            if not set(w) <= set(losses):
                raise ShapeError(f"weights {w} do not fit losses {losses}: their dims must be dims of the losses")
        return Shape((SUMS,))

    def dtype(self, *args: DType) -> DType:
        super().dtype(*args)
        return DType.FLOAT32

    def reads(self, out: Value) -> tuple[Reads, ...]:
        return tuple(Reads(summed=a.shape.names) for a in out.args)

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return out.args[1:]


@frozen
class StackLosses(Op):
    """The sums of several losses: each [sums=2] to [losses sums=2]. Training minimises sum(coefficient_i * mean_i)."""

    coefficients: tuple[float, ...]
    work_kind: ClassVar[WorkKind] = WorkKind.NONE

    def shape(self, *args: Shape) -> Shape:
        for s in args:
            if s.dims != (SUMS,):
                raise ShapeError(f"cannot add {s} to a sum of losses: give values that end in a loss")
        if len(args) != len(self.coefficients):
            raise ShapeError(f"{len(args)} losses need {len(args)} coefficients, got {len(self.coefficients)}")
        return Shape((Dim("losses", len(args)), SUMS))

    def dtype(self, *args: DType) -> DType:
        return DType.FLOAT32

    def reads(self, out: Value) -> tuple[Reads, ...]:
        return (PLAIN,) * len(out.args)

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return ()


def loss_sums(losses: Value, weights: Value | None = None) -> Value:
    """Return the end of a loss: training minimises sum(weights * losses) / sum(weights) over the global batch.

    losses: one for each token or sequence. weights: their weights, 1 if not given. Raises ShapeError if the weights
    have a dim that the losses lack.
    """
    return apply(LossSums(), losses, *([] if weights is None else [weights]))


def is_loss(v: Value) -> bool:
    """Return True if a value ends in a loss: its numbers are sums of losses and of weights."""
    return isinstance(v.source.op, LossSums | StackLosses)
