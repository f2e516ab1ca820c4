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
    return whole_function(here.out)


@singledispatch
def first_state(op: Op, out: Value, args: tuple[Tensor, ...]) -> OpState | None:
    """Return the state after a prompt, from the arguments at all its positions; None if the op keeps none."""
    return None


@singledispatch
def next_position(op: Op, here: LocalOp) -> NextPosition:
    """Return the function that computes the op at the newest position."""
    raise UserError(_missing(op, "next_position"))


def whole_function(out: Value) -> TensorFunction:
    """Return `whole` as a function of the arguments alone."""
    return partial(whole.dispatch(type(out.op)), out.op, out)


def check_next_position(op: Op) -> None:
    """Raise UserError if the op has no function for the next position."""
    if next_position.dispatch(type(op)) is next_position.dispatch(object):
        raise UserError(_missing(op, "next_position"))


def _missing(op: Op, function: str) -> str:
    """Return the message that says where to write a function of an op."""
    name = type(op).__name__
    return (
        f"the op {name} has no function `{function}`\n"
        f"write it for your own op in the module that declares {name}, for an op of megaloom.dsl in the file of its "
        f"family in runtime/ops, and decorate it with @{function}.register"
    )
