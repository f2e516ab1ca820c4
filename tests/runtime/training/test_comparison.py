"""The comparison of two short runs: what counts as a difference."""

import math

import pytest

from megaloom.runtime.training.verify import Comparison, Curve


def comparison(losses: tuple[float, ...], reference: tuple[float, ...]) -> Comparison:
    norms = tuple(1.0 for _ in losses)
    return Comparison(Curve(losses, norms), Curve(reference, norms), 1e-5)


def test_losses_up_to_one_are_compared_absolutely_and_larger_ones_in_proportion() -> None:
    assert comparison((0.1, 0.2), (0.1, 0.2 + 2e-6)).loss_error == pytest.approx(2e-6)
    assert not comparison((0.1, 0.2), (0.1, 0.2 + 2e-5)).agrees
    assert comparison((343.7 + 1.1e-5,), (343.7,)).loss_error == pytest.approx(1.1e-5 / 343.7)
    assert comparison((343.7 + 1.1e-5,), (343.7,)).agrees
    assert not comparison((343.7 + 5e-3,), (343.7,)).agrees


@pytest.mark.parametrize("losses", [(math.nan, 1.0), (1.0, math.nan)])
def test_nan_is_a_difference_in_any_step(losses: tuple[float, ...]) -> None:
    assert not comparison(losses, (1.0, 1.0)).agrees
    assert not comparison((1.0, 1.0), losses).agrees
