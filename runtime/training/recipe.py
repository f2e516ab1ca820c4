"""How a model is trained, whatever the layout. Free of torch: the command line shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import Attribute, field, frozen

from megaloom.dsl.errors import UserError


def _within(low: float, high: float) -> Callable[[Any, Attribute[Any], float], None]:
    """A validator: the value lies in [low, high], which nan does not."""

    def check(owner: Any, attribute: Attribute[Any], value: float) -> None:
        if not low <= value <= high:
            name = attribute.name.replace("_", "-")
            raise UserError(f"a recipe with {name} {value:g}: it can be from {low:g} to {high:g}")

    return check


@frozen(kw_only=True)
class Recipe:
    """AdamW, with a linear warm-up and a cosine down to `min_lr` at the last step."""

    steps: int = field(default=300, validator=_within(1, 1e9))
    """Optimizer steps in all, with those before a resume."""
    lr: float = field(default=3e-3, validator=_within(1e-12, 1e3))
    """The highest learning rate."""
    min_lr: float = field(default=1e-4, validator=_within(0, 1e3))
    """The last learning rate."""
    warmup: int = field(default=20, validator=_within(0, 1e9))
    """Steps up to the highest learning rate."""
    weight_decay: float = field(default=0.1, validator=_within(0, 1e3))
    """Of all parameters but norms and biases."""
    clip_grad: float = field(default=1.0, validator=_within(1e-12, 1e12))
    """The gradient's norm is cut to this."""
    beta1: float = field(default=0.9, validator=_within(0, 0.999999))
    """How much of the gradient's mean stays each step."""
    beta2: float = field(default=0.95, validator=_within(0, 0.999999))
    """How much of its mean square stays each step."""
    eps: float = field(default=1e-8, validator=_within(0, 1))
    """Added to the root of the mean square."""
    seed: int = field(default=1234, validator=_within(0, 2**31))
    """Of the initial weights, of the order of the text, of dropout."""
