"""Elementwise functions: values and gradients as torch has them, and the traffic of the kernels that compute them."""

from __future__ import annotations

from math import prod

import pytest
import torch

from megaloom.dsl import Dim, Input, Shape, Value, fn, graph, model
from megaloom.dsl.dims import DType
from megaloom.dsl.errors import ShapeError
from megaloom.dsl.facts.primitives import program, separate_ops
from megaloom.dsl.facts.separate_ops import traffic
from megaloom.dsl.value import COMPARISONS, FUNCTIONS, UNARY
from megaloom.runtime.ops import whole

DIMS = Dim("rows", 8), Dim("columns", 16)
X, Y = (Value(Input(name), (), Shape(DIMS)) for name in "xy")
CHOICES = {"min": torch.minimum, "max": torch.maximum, "div": torch.div}


def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.rand(8, 16) + 0.5, torch.rand(8, 16) + 0.5


@pytest.mark.parametrize("name", CHOICES)
def test_functions_of_two_arguments(name: str) -> None:
    x, y = drawn()
    out = fn(name, X, Y)
    assert torch.equal(whole(out.op, out, x, y), CHOICES[name](x, y))


def test_operators_compare_and_where_chooses() -> None:
    x, y = drawn()
    for out, right in ((X < Y, x < y), (X <= Y, x <= y), (X > Y, x > y), (X >= Y, x >= y)):
        assert out.dtype is DType.MASK
        assert torch.equal(whole(out.op, out, x, y), right)
    condition = X > Y
    chosen = fn("where", condition, X, Y)
    assert torch.equal(whole(chosen.op, chosen, x > y, x, y), torch.maximum(x, y))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ShapeError, match="where needs three arguments, got 2"):
        fn("where", X, Y)
    with pytest.raises(ShapeError, match="the first argument of where must be a mask"):
        fn("where", X, X, Y)
    tokens = Value(Input("tokens"), (), Shape(DIMS), dtype=DType.INDEX)
    assert fn("equal", tokens, tokens).dtype is DType.MASK
    with pytest.raises(ShapeError, match="equal compares ids with ids, or numbers with numbers"):
        fn("equal", tokens, X)


def test_every_function_is_evaluated() -> None:
    x, y = drawn()
    for name in FUNCTIONS:
        args = {"where": (x > y, x, y)}.get(name, (x,) if name in UNARY else (x, y))
        values = {"where": (X > Y, X, Y)}.get(name, (X,) if name in UNARY else (X, Y))
        out = fn(name, *values)
        result = whole(out.op, out, *args)
        assert result.shape == (8, 16), name
        assert (result.dtype is torch.bool) is (name in COMPARISONS), name


def test_the_traffic_of_a_choice_counts_what_it_reads_and_writes() -> None:
    p = separate_ops(program(graph(model("m", fn("max", X, Y))).nodes[-1]))
    (step,) = (step for step in p.steps if step.value.args)
    counted, all_kernels = traffic(p, step, lambda v: prod(d.known for d in v.shape))
    n = 8 * 16
    assert all_kernels
    assert counted.forward == 3 * n + 2 * n  # inputs are data; the result changes its order
