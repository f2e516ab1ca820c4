"""Every op of megaloom.dsl has its torch code in runtime/ops, and what has none is refused with what to write."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megaloom import dsl
from megaloom.dsl import Elementwise, Layer, Op, UserError, Value
from megaloom.dsl.base_ops import GivenTensor
from megaloom.runtime.ops import first_state, local, next_position, whole
from megaloom.runtime.ops.registry import check_next_position


class Mystery(Elementwise):
    """An op without torch code."""

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return ()


def ops() -> Iterator[type[Op]]:
    """The ops of megaloom.dsl that compute something by themselves."""
    classes = (x for x in vars(dsl).values() if isinstance(x, type) and issubclass(x, Op))
    for x in classes:
        if not issubclass(x, Layer | GivenTensor) and "base_class" not in vars(x):
            yield x


def test_every_op_has_torch_code_in_a_family() -> None:
    functions = {op: whole.dispatch(op) for op in ops()}
    assert len(functions) > 25
    assert {f.__module__.rpartition(".")[0] for f in functions.values()} == {"megaloom.runtime.ops"}


def test_every_op_that_decodes_from_a_state_can_begin_and_go_on() -> None:
    plain = Op.decoding
    stated = {op for op in ops() if op.decoding is not plain}
    going_on = {op for op in ops() if next_position.dispatch(op) is not next_position.dispatch(object)}
    assert going_on <= stated
    assert {op for op in ops() if first_state.dispatch(op) is not first_state.dispatch(object)} <= going_on


def test_the_functions_of_an_op_are_in_one_file() -> None:
    for op in ops():
        found = {f.dispatch(op).__module__ for f in (whole, local, first_state, next_position)}
        assert len(found - {"megaloom.runtime.ops.registry"}) == 1, op


def test_an_op_without_torch_code_is_refused() -> None:
    with pytest.raises(UserError, match=r"the op Mystery has no function `whole`\n.*module that declares Mystery"):
        whole(Mystery(), None)
    with pytest.raises(UserError, match=r"no function `next_position`\n(.|\n)*@next_position.register"):
        check_next_position(Mystery(), state=False)
    with pytest.raises(UserError, match=r"the op Rope has no function `first_state`"):
        check_next_position(dsl.Rope(1e4), state=True)
