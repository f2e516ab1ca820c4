"""The comparison of two short runs: what counts as a difference."""

import math

import pytest
import torch
from attrs import evolve

from megaloom.runtime.training.verify import Comparison, Curve, noise_of_alike


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


def test_norms_and_later_losses_may_differ_by_the_noise_of_the_norm() -> None:
    """A kink changes gradients by more than the tolerance, and with them what follows; the first loss it does not."""
    kink = Comparison(Curve((2.0, 1.5), (1.0, 1.0)), Curve((2.0, 1.5 + 5e-5), (1.0, 1.0 + 5e-5)), 1e-5)
    assert not kink.agrees
    assert evolve(kink, norm_noise=5e-6, noise_margin=20.0).agrees
    assert not evolve(kink, norm_noise=1e-6, noise_margin=20.0).agrees
    first = Comparison(Curve((2.0 + 5e-5,), (1.0,)), Curve((2.0,), (1.0,)), 1e-5, norm_noise=5e-6, noise_margin=20.0)
    assert not first.agrees


def test_a_gradient_is_as_noisy_as_the_same_weight_of_another_layer() -> None:
    gradients = {"mlp.0.up": torch.tensor([2.0]), "mlp.1.up": torch.tensor([4.0]), "mlp.1.down": torch.tensor([1.0])}
    noise = {"mlp.0.up": 2e-3, "mlp.1.up": 1e-7, "mlp.1.down": 1e-7}
    assert noise_of_alike(noise, gradients) == pytest.approx({"mlp.0.up": 2e-3, "mlp.1.up": 4e-3, "mlp.1.down": 1e-7})


def test_noise_of_a_gradient_of_zero_is_its_own() -> None:
    gradients = {"attention.0.k_bias": torch.zeros(2), "attention.1.k_bias": torch.tensor([1e-9])}
    noise = {"attention.0.k_bias": 1e-8, "attention.1.k_bias": 1e-8}
    assert noise_of_alike(noise, gradients) == noise
