"""How a model is trained, whatever the layout. Free of torch: the command line shows it."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge, gt, le, lt


@frozen(kw_only=True)
class Recipe:
    """AdamW, with a linear warm-up and a cosine down to `min_lr` at the last step."""

    steps: int = field(default=300, validator=ge(1))
    """Optimizer steps in all, with those before a resume."""
    lr: float = field(default=2e-3, validator=gt(0))
    """The highest learning rate."""
    min_lr: float = field(default=1e-4, validator=ge(0))
    """The last learning rate."""
    warmup: int = field(default=20, validator=ge(0))
    """Steps up to the highest learning rate."""
    weight_decay: float = field(default=0.1, validator=ge(0))
    """Of all parameters but norms and biases."""
    clip_grad: float = field(default=1.0, validator=gt(0))
    """The gradient's norm is cut to this."""
    beta1: float = field(default=0.9, validator=[ge(0), lt(1)])
    """How much of the gradient's mean stays each step."""
    beta2: float = field(default=0.95, validator=[ge(0), lt(1)])
    """How much of its mean square stays each step."""
    eps: float = field(default=1e-8, validator=gt(0))
    """Added to the root of the mean square."""
    seed: int = field(default=1234, validator=[ge(0), le(2**31)])
    """Of the initial weights, of the order of the text, of dropout."""
