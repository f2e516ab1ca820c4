"""Declared reads of an op are compared with the reads of its function. `test_reads_law` draws ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from attrs import frozen
from torch import Tensor

from megaloom.dsl import Dim, DType, Normalize, Op, Reads, Shape, UserError, Value, WorkKind, apply, ids, weight
from megaloom.dsl.ops.weight import Lookup
from megaloom.runtime.ops import whole
from megaloom.runtime.reference.declared_reads import check_reads

EMBED, FF = Dim("embed", 64), Dim("ff", 96)
SEQ = frozenset({"seq"})
Function = Callable[..., Tensor]


@frozen
class Plain(Op):
    """An op of one argument and its shape, whose reads and function a test chooses."""

    base_class: ClassVar[bool] = True
    work_kind: ClassVar[WorkKind] = WorkKind.MEMORY

    def shape(self, *args: Shape) -> Shape:
        return args[0]

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return out.args


def own(function: Function, *reads: Reads, base: type[Op] = Plain, **members: object) -> Op:
    """Return an op of a new class, Own, with this function and these reads."""

    def declared(self: Op, out: Value) -> tuple[Reads, ...]:
        return reads

    kind = frozen(type("Own", (base,), {"reads": declared, "base_class": False, "__module__": __name__, **members}))
    whole.register(kind)(lambda op, out, *args: function(*args))
    return kind()  # type: ignore[no-any-return]


def embedded() -> Value:
    return apply(Lookup("vocab"), ids(), weight("table", Dim("vocab", 256), EMBED))


def refusal(op: Op, *args: Value) -> str:
    """Return the message with which an op is refused; empty if it is accepted."""
    try:
        check_reads(apply(op, *(args or (embedded(),))), "mix.0 (model.py:7)")
    except UserError as error:
        return str(error)
    return ""


def test_the_message_says_what_is_declared_what_is_found_and_what_to_write() -> None:
    said = refusal(own(lambda x: x.cumsum(1), Reads()))
    first, advice = said.split("\n")
    assert first.startswith(
        "mix.0 (model.py:7) applies Own to [batch seq embed=64]: it declares no reads along seq, but its function on "
        "the indices [0, 2, 4, 6, 8, 10] of seq alone gives another result: they differ by "
    )
    assert advice == (
        "declare Reads(whole=frozenset({'seq'})) for argument 1 in Own.reads: it is right for every op, and gathers "
        "the dim"
    )
    assert not refusal(own(lambda x: x.cumsum(1), Reads(whole=SEQ)))


def position(x: Tensor) -> Tensor:
    return x * (1 + torch.arange(x.shape[1])[:, None])


def test_the_advice_is_the_cheapest_statement_that_is_true() -> None:
    without = {"shape": lambda self, *args: args[0].without("embed")}
    assert "\ndeclare Reads(offset=frozenset({'seq'})) for argument 1 in Own.reads" in refusal(own(position, Reads()))
    assert not refusal(own(position, Reads(offset=SEQ)))
    said = refusal(own(lambda x: x.sum(-1), Reads(), **without))
    assert said.endswith("but the result lacks that dim\ndeclare Reads(summed=('embed',)) for argument 1 in Own.reads")
    assert not refusal(own(lambda x: x.sum(-1), Reads(summed=("embed",)), **without))
    said = refusal(own(lambda x: x.sum(-1) + 1, Reads(summed=("embed",)), **without))
    assert "it declares embed as summed for argument 1, but the results for two shards of embed do not add up" in said
    assert "zeros that pad embed change the result" in refusal(
        own(lambda x: x.exp().sum(-1), Reads(summed=("embed",)), **without)
    )


def test_two_arguments_are_read_each_as_it_is_declared() -> None:
    def product(x: Tensor, y: Tensor) -> Tensor:
        return x.cumsum(1) * y

    x = embedded()
    assert not refusal(own(product, Reads(whole=SEQ), Reads()), x, 2.0 * x)
    assert "for the indices 0, 2, .. of seq alone" in refusal(own(product, Reads(whole=SEQ, keys=True), Reads()), x, x)

    def taken(x: Tensor, at: Tensor) -> Tensor:
        return x.gather(1, at[..., None].expand(-1, -1, x.shape[2]))

    assert not refusal(own(taken, Reads(whole=SEQ, keys=True), Reads(), dtype=lambda *_: DType.COMPUTE), x, ids())
    assert refusal(own(taken, Reads(), Reads(), dtype=lambda *_: DType.COMPUTE), x, ids())


class BackwardMixes(torch.autograd.Function):
    """The argument, with a gradient that other positions have a part in."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return gradients[0].cumsum(1)


WRONG: dict[str, tuple[Op, str]] = {
    "a gradient that mixes": (own(BackwardMixes.apply, Reads()), "the gradient of argument 1 for two shards of seq"),
    "detached": (own(lambda x: x.detach() * 2, Reads()), "depends on argument 1, and has no gradient for it"),
    "in place": (own(lambda x: x.mul_(2), Reads()), "its function changes argument 1 in place"),
    "random": (own(lambda x: x * torch.rand_like(x), Reads()), "another result when it is called again"),
    "fails": (own(lambda x: x.view(-1, 7, 64), Reads()), "its function raises RuntimeError for random numbers: shape"),
    "fails on shards": (own(lambda x: x.view(-1, 12, 6), Reads()), "raises RuntimeError for the indices 0, 2, .. of"),
    "order of dims": (own(lambda x: x.transpose(1, 2), Reads()), "its function returns a tensor [3, 6, 12], and its"),
    "element type": (own(lambda x: x.float(), Reads()), "returns torch.float32 for arguments of float64, and its"),
    "not finite": (own(lambda x: x.log() - x.log(), Reads(), dtype=lambda *_: DType.COMPUTE), ""),
    "infinite": (own(lambda x: x / 0, Reads()), "its function returns NaN or infinite numbers"),
    "samples": (own(lambda x: x - x.mean(0), Reads()), "it declares no reads along batch"),
    "declared samples": (
        own(lambda x: x - x.mean(0), Reads(whole=frozenset({"batch"}))),
        "it reads other samples of the batch in argument 1",
    ),
    "statistics": (
        own(lambda x: x, Reads(statistics=("embed",))),
        "it declares statistics for argument 1, which needs",
    ),
    "located": (own(lambda x: x, Reads(offset=SEQ, located=True)), "it declares located for argument 1"),
    "number of reads": (own(lambda x: x), "Own.reads returns ()\nreturn a tuple of 1 Reads"),
    "summed and whole": (
        own(lambda x: x, Reads(SEQ, summed=("seq",))),
        "declares summed over seq of argument 1, which",
    ),
    "elementwise": (own(lambda x: x.cumsum(1), Reads(SEQ), elementwise=True), "Own is elementwise, and declares reads"),
    "channelwise": (
        own(lambda x: x.cumsum(1).cumsum(2), Reads(SEQ | {"embed"}), channelwise=True),
        "Own is channelwise, and reads embed, which is no sequence",
    ),
    "padding": (
        own(lambda x: x.cumsum(2), Reads(frozenset({"embed"})), ignores_padding=True),
        "",  # what is before the padding of a running sum does not read it
    ),
    "padding that is read": (
        own(lambda x: x.flip(2).cumsum(2).flip(2), Reads(frozenset({"embed"})), ignores_padding=True),
        "it states ignores_padding, but numbers in the padding of embed, such as 1e+06, change the result",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_the_runtime_would_compute_wrongly_is_refused(name: str) -> None:
    op, message = WRONG[name]
    assert message in refusal(op)
    assert bool(message) is bool(refusal(op))


def test_a_case_is_small_and_larger_than_the_numbers_of_the_op() -> None:
    @frozen
    class Rolled(Plain):
        by: int = 6
        base_class: ClassVar[bool] = True

        def reads(self, out: Value) -> tuple[Reads, ...]:
            return (Reads(),)

    kind = frozen(type("Own", (Rolled,), {"base_class": False, "__module__": __name__}))
    whole.register(kind)(lambda op, out, x: x.roll(op.by, 2))
    for by in (6, 8, 24, 48):  # each is the size of a small dim, along which such a roll changes nothing
        assert "it declares no reads along embed" in refusal(kind(by))


def test_ops_of_megaloom_and_those_that_keep_their_function_are_not_checked() -> None:
    @frozen
    class Renamed(Normalize):
        pass

    check_reads(apply(Renamed(("embed",), True, 1e-5), embedded()))
    check_reads(embedded())
