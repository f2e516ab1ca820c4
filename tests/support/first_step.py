"""The first step of a run against transformers: its loss, and the gradient of each weight."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megaloom.planner.contract.workload import Precision
from megaloom.runtime.training.verify import NOISE_MARGIN

RELATIVE = 1e-6  # of the largest element of a gradient, or what rounding in 32 bits changes in transformers
FirstStep = tuple[float, Mapping[str, Tensor]]
"""A loss, and the gradients by the names of the weights."""


def check_first_step(found: FirstStep, expected: FirstStep, rounded: FirstStep, context: str = "") -> None:
    """Raise AssertionError if a first step differs. expected: in 64 bits by transformers; rounded: in 32 bits."""
    (loss, gradients), (expected_loss, wanted_gradients), margin = found, expected, NOISE_MARGIN[Precision.FP32]
    assert abs(loss - expected_loss) <= max(RELATIVE * expected_loss, margin * abs(rounded[0] - expected_loss)), context
    assert gradients.keys() == wanted_gradients.keys(), context
    for weight, gradient in gradients.items():
        wanted, error = wanted_gradients[weight].double(), (gradient.double() - wanted_gradients[weight]).abs()
        noise = (rounded[1][weight].double() - wanted).abs().max()
        limit = max(RELATIVE * float(wanted.abs().max()), margin * float(noise))
        assert float(error.max()) <= limit, (context, weight)
