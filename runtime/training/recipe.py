"""The training recipe: optimizer, learning rate and number of steps. Independent of the layout; free of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import Attribute, field, frozen

from megaloom.dsl.errors import UserError


def _within(low: float, high: float) -> Callable[[Any, Attribute[Any], float], None]:
    """Return a validator that requires a value in [low, high]; NaN is refused."""

    def check(owner: Any, attribute: Attribute[Any], value: float) -> None:
        if not low <= value <= high:
            name = attribute.name.replace("_", "-")
            raise UserError(f"--{name} {value:g} is out of range\ngive a value from {low:g} to {high:g}")

    return check


@frozen(kw_only=True)
class Recipe:
    """AdamW with linear warm-up and cosine decay to `min_lr` at the last step."""

    steps: int = field(default=300, validator=_within(1, 1e9))
    """Total number of optimizer steps, including those before a resume."""
    lr: float = field(default=3e-3, validator=_within(1e-12, 1e3))
    """Peak learning rate."""
    min_lr: float = field(default=1e-4, validator=_within(0, 1e3))
    """Learning rate at the last step."""
    warmup: int = field(default=20, validator=_within(0, 1e9))
    """Warm-up steps."""
    weight_decay: float = field(default=0.1, validator=_within(0, 1e3))
    """Weight decay of all parameters except norms and biases."""
    clip_grad: float = field(default=1.0, validator=_within(1e-12, 1e12))
    """Gradient norms above this are clipped to it."""
    beta1: float = field(default=0.9, validator=_within(0, 0.999999))
    """Decay of the first moment."""
    beta2: float = field(default=0.95, validator=_within(0, 0.999999))
    """Decay of the second moment."""
    eps: float = field(default=1e-8, validator=_within(0, 1))
    """Added to the square root of the second moment."""
    seed: int = field(default=1234, validator=_within(0, 2**31))
    """Seed of initial weights, data order and dropout."""
