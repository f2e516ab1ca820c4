"""The torch code of ops: of each op, the functions that the family files of this folder register by its class.

- `whole`: the result, of whole tensors. Every op has it.
- `local`: this rank's shard of the result, where that is not `whole` of the shards of the arguments.
- `next_position`: the result at the newest position, of ops whose `decoding` needs a state or the position.
- `first_state`: what `next_position` needs of a prompt, of ops whose `decoding` needs a state.

For an op of your own, decorate functions in its module with `@whole.register` and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, singledispatch
from typing import Any

from torch import Tensor

from megaloom.dsl import Op, UserError, Value

from .kv_cache import OpState, Rows
from .local_op import LocalOp, TensorFunction

NextPosition = Callable[[Rows, OpState | None, tuple[Tensor, ...]], Tensor]
"""From the rows of a batch, the state of an op, and its arguments at the newest position: its result there.

It updates the state in place, and reads no numbers on the host, so that a CUDA graph can repeat it.
"""


@singledispatch
def whole(op: Op, out: Value, *args: Tensor) -> Tensor:
    """Return the value `out` of an op for these arguments. The dims of each tensor are in the order of its shape."""
    raise UserError(_missing(op, "whole"))


@singledispatch
def local(op: Op, here: LocalOp) -> TensorFunction:
    """Return the function of local arguments that computes this rank's shard of the result."""
    summed = tuple(name for reads in here.placed.step.reads for name in reads.summed if not reads.rows)
    over = set(here.out.shape.names).union(*(a.shape.names for a in here.out.args)) if has_own_whole(op) else summed
    if any(here.axis(name) in ("tp", "etp") for name in over):  # of any degree
        return partial(_of_padded, here, summed)
    return whole_function(here.out)


def local_function(here: LocalOp) -> TensorFunction:
    """Return the function of `local` for an op, unless its class has `whole` of its own and inherits `local`."""
    kind = type(here.out.op)
    inherits = _order(whole, kind) < _order(local, kind)
    return local.dispatch(object if inherits else kind)(here.out.op, here)


def has_own_whole(op: Op) -> bool:
    """Return whether `whole` of an op is a user's own."""
    return not whole.dispatch(type(op)).__module__.startswith("megaloom.runtime.")


def has_own_local(op: Op) -> bool:
    """Return whether an op whose `whole` is a user's own has `local` too."""
    return has_own_whole(op) and _order(local, type(op)) <= _order(whole, type(op))


def _order(function: Any, kind: type) -> int:
    """Return the place, in the order of its base classes, of the class whose function an op has."""
    return next(i for i, base in enumerate(kind.__mro__) if base in function.registry)


def _of_padded(here: LocalOp, summed: tuple[str, ...], *args: Tensor) -> Tensor:
    """Return `whole` of arguments with zeros in the padding of dims that it sums over, so that they add nothing.

    A layout pads a vocabulary on a single device too, and what is computed from padding may be infinite. A user's own
    function has ones in other padding: its gradient there is then finite.
    """
    op, names = here.out.op, {name for a in here.out.args for name in a.shape.names}
    others = tuple(names.difference(summed)) if has_own_whole(op) else ()
    filled = (
        here.fill_padding(a, here.fill_padding(a, x, others, 1), summed, 0)
        for a, x in zip(here.out.args, args, strict=True)
    )
    return whole(op, here.out, *filled)


@singledispatch
def first_state(op: Op, out: Value, args: tuple[Tensor, ...]) -> OpState | None:
    """Return the state after a prompt, from the arguments at all its positions.

    None if the op reads another sequence, whose values are computed once.
    """
    raise UserError(_missing(op, "first_state"))


@singledispatch
def next_position(op: Op, here: LocalOp) -> NextPosition:
    """Return the function that computes the op at the newest position."""
    raise UserError(_missing(op, "next_position"))


def whole_function(out: Value) -> TensorFunction:
    """Return `whole` as a function of the arguments alone."""
    return partial(whole.dispatch(type(out.op)), out.op, out)


def check_next_position(op: Op, *, state: bool) -> None:
    """Raise UserError if the op has no function for the next position, or none for its state."""
    if next_position.dispatch(type(op)) is next_position.dispatch(object):
        raise UserError(_missing(op, "next_position"))
    if state and first_state.dispatch(type(op)) is first_state.dispatch(object):
        raise UserError(_missing(op, "first_state"))


def _missing(op: Op, function: str) -> str:
    """Return the message that says where to write a function of an op."""
    name = type(op).__name__
    return (
        f"the op {name} has no function `{function}`\n"
        f"write it for your own op in the module that declares {name}, for an op of megaloom.dsl in the file of its "
        f"family in runtime/ops, and decorate it with @{function}.register"
    )
