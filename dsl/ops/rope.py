"""Rotary position embeddings (RoPE), and the ways to scale them to longer sequences."""

from __future__ import annotations

from math import ceil, floor, log, pi
from typing import Any, ClassVar

from attrs import field, frozen

from megaloom.dsl.base_ops import COPY
from megaloom.dsl.dims import Shape
from megaloom.dsl.errors import ShapeError
from megaloom.dsl.op import ALONE, Decoding, Op, Reads
from megaloom.dsl.value import Value
from megaloom.dsl.work_kinds import Elements, Traffic, WorkKind

# Passes over rotated channels, as halves: four products, a sum and a difference, and both halves joined. Backward: the
# gradient of each, a negation, and the sums of two gradients of each half.
ROPE_PASSES = (9, 10)


def int_if_whole(theta: Any) -> Any:
    """Return a float without a fraction as an int, so that 1e6 and 1_000_000 give equal layers; else the argument."""
    return int(theta) if isinstance(theta, float) and theta.is_integer() else theta


def _at_least_1(_: object, __: object, factor: float) -> None:
    if not factor >= 1:
        raise ShapeError(f"the factor of RoPE scaling must be at least 1, got {factor}")


@frozen
class LinearScaling:
    """Position interpolation: divide every frequency by `factor`. Source: Chen et al., arXiv:2306.15595."""

    factor: float = field(converter=int_if_whole, validator=_at_least_1)
    magnitude: float = 1.0

    def scaled(self, frequencies: tuple[float, ...], theta: float) -> tuple[float, ...]:
        """Return the scaled frequencies, in radians per position."""
        return tuple(f / self.factor for f in frequencies)


@frozen(kw_only=True)
class Llama3Scaling:
    """Divide low frequencies by `factor`, keep high ones, and interpolate between them.

    A frequency is low if it completes fewer than `low_freq_factor` periods in the `original` sequence length, high if
    it completes more than `high_freq_factor`. Source: Llama 3.1's reference code (Dubey et al., arXiv:2407.21783).
    """

    factor: float = field(converter=int_if_whole, validator=_at_least_1)
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original: int = 8192
    magnitude: float = 1.0

    def __attrs_post_init__(self) -> None:
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ShapeError(
                "Llama 3 RoPE scaling needs 0 < low_freq_factor < high_freq_factor, "
                f"got {self.low_freq_factor} and {self.high_freq_factor}"
            )

    def scaled(self, frequencies: tuple[float, ...], theta: float) -> tuple[float, ...]:
        """Return the scaled frequencies, in radians per position."""
        periods = (self.original * f / (2 * pi) for f in frequencies)
        low, high = self.low_freq_factor, self.high_freq_factor
        unscaled = (min(1.0, max(0.0, (t - low) / (high - low))) for t in periods)
        return tuple(f * (u + (1 - u) / self.factor) for f, u in zip(frequencies, unscaled, strict=True))


@frozen(kw_only=True)
class YarnScaling:
    """YaRN: divide low frequencies by `factor`, keep high ones, and interpolate between them.

    A frequency is high if it completes more than `beta_fast` periods in the `original` sequence length, low if fewer
    than `beta_slow`. truncate: the range between begins and ends at whole channels. Queries and keys are multiplied by
    `attention_factor`, by default 0.1 ln(factor) + 1. Source: Peng et al., arXiv:2309.00071.
    """

    factor: float = field(converter=int_if_whole, validator=_at_least_1)
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __attrs_post_init__(self) -> None:
        if not 0 < self.beta_slow <= self.beta_fast:
            raise ShapeError(f"YaRN needs 0 < beta_slow ≤ beta_fast, got {self.beta_slow} and {self.beta_fast}")

    @property
    def magnitude(self) -> float:
        """The factor on queries and keys."""
        return yarn_magnitude(self.factor) if self.attention_factor is None else self.attention_factor

    def scaled(self, frequencies: tuple[float, ...], theta: float) -> tuple[float, ...]:
        """Return the scaled frequencies, in radians per position."""
        n = len(frequencies)
        first, last = (n * log(self.original / (t * 2 * pi)) / log(theta) for t in (self.beta_fast, self.beta_slow))
        if self.truncate:
            first, last = floor(first), ceil(last)
        first, last = max(first, 0), min(last, 2 * n - 1)
        last += 0.001 if first == last else 0
        unscaled = (1 - min(1.0, max(0.0, (i - first) / (last - first))) for i in range(n))
        return tuple(f * (u + (1 - u) / self.factor) for f, u in zip(frequencies, unscaled, strict=True))


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's attention factor for sequences `factor` times as long: 0.1 mscale ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * log(factor) + 1.0


@frozen
class Rope(Op):
    """Rotate pairs of channels by position * theta^(-2i/channels), for the first `channels` channels (None: all).

    Pair i is channel i of the first half with channel i of the second half, as in GPT-NeoX and Llama; with
    `interleaved` it is channels 2i and 2i + 1, as in GPT-J. Source: Su et al., arXiv:2104.09864.
    """

    theta: float = field(converter=int_if_whole)
    channels: int | None = None
    interleaved: bool = False
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None
    work_kind: ClassVar[WorkKind] = WorkKind.ROTARY
    arity: ClassVar[int] = 1

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.theta, (int, float)) or not self.theta > 1:
            raise ShapeError(f"the RoPE base must be a number above 1, such as 10_000, got {self.theta!r}")
        if self.channels is not None and (self.channels < 2 or self.channels % 2):
            raise ShapeError(f"RoPE rotates pairs of channels: `channels` must be 2, 4, 6, ..., got {self.channels}")

    def shape(self, *args: Shape) -> Shape:
        (x,) = args
        n = self.rotated_channels(x)
        if n % 2:
            raise ShapeError(f"cannot apply RoPE to {x}: it rotates pairs of channels, so head_dim must be even")
        if n > x["head_dim"].known:
            raise ShapeError(f"cannot rotate {n} channels of {x}\nchannels can be up to {x['head_dim'].known}")
        return x

    def reads(self, out: Value) -> tuple[Reads, ...]:
        return (Reads(offset=frozenset({out.shape.positions("heads", "kv_heads", "head_dim").name})),)

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return ()

    def torch_traffic(self, out: Value, elements: Elements) -> Traffic:
        n = elements(out)
        rotated = n * self.rotated_channels(out.shape) // out.shape["head_dim"].known
        forward, backward = (passes * rotated + COPY * n for passes in ROPE_PASSES)
        return Traffic(forward, backward, 8, 11)

    def decoding(self, out: Value, along: str) -> Decoding:
        return Decoding(position=True) if along in out.shape else ALONE

    def rotated_channels(self, x: Shape) -> int:
        """Return the number of channels of each head that are rotated."""
        return x["head_dim"].known if self.channels is None else self.channels

    def frequencies(self, channels: int) -> tuple[float, ...]:
        """Return the angle between neighbouring positions for each pair of channels, in radians."""
        plain = tuple(self.theta ** (-2 * i / channels) for i in range(channels // 2))
        return plain if self.scaling is None else self.scaling.scaled(plain, self.theta)

    @property
    def magnitude(self) -> float:
        """The factor on the rotated channels."""
        return 1.0 if self.scaling is None else self.scaling.magnitude
