"""Rotary positions, and the ways of stretching them to sequences longer than a model was first trained on."""

from __future__ import annotations

from math import ceil, floor, log, pi
from typing import Any, ClassVar

from attrs import field, frozen

from megaloom.dsl.dims import Shape
from megaloom.dsl.errors import ShapeError
from megaloom.dsl.value import Op


def base(theta: Any) -> Any:
    """A whole number as such: 1e6 and 1_000_000 are equal, so models of them have one identity."""
    return int(theta) if isinstance(theta, float) and theta.is_integer() else theta


def _longer(_: object, __: object, factor: float) -> None:
    if not factor >= 1:
        raise ShapeError(f"a factor of {factor} makes sequences no longer: it takes 1 or more")


@frozen
class LinearScaling:
    """Every position counts for 1 / factor. Source: Chen et al., arXiv:2306.15595."""

    factor: float = field(converter=base, validator=_longer)
    magnitude: float = 1.0

    def stretch(self, speeds: tuple[float, ...], theta: float) -> tuple[float, ...]:
        """The angles per position, from those that it was trained on."""
        return tuple(s / self.factor for s in speeds)


@frozen(kw_only=True)
class Llama3Scaling:
    """Slow channels turn `factor` times slower, fast ones as before, those between in proportion.

    A channel is slow if it turns less than `low` times in the `original` sequence, fast if more than `high` times.
    Source: Llama 3.1's reference code (Dubey et al., arXiv:2407.21783).
    """

    factor: float = field(converter=base, validator=_longer)
    low: float = 1.0
    high: float = 4.0
    original: int = 8192
    magnitude: float = 1.0

    def __attrs_post_init__(self) -> None:
        if not 0 < self.low < self.high:
            raise ShapeError(f"slow channels turn less than fast ones: low={self.low} must be below high={self.high}")

    def stretch(self, speeds: tuple[float, ...], theta: float) -> tuple[float, ...]:
        """The angles per position, from those that it was trained on."""
        turns = (self.original * s / (2 * pi) for s in speeds)
        kept = (min(1.0, max(0.0, (t - self.low) / (self.high - self.low))) for t in turns)
        return tuple(s * (k + (1 - k) / self.factor) for s, k in zip(speeds, kept, strict=True))


@frozen(kw_only=True)
class YarnScaling:
    """Channels that turn more than `fast` times in the `original` sequence stay, those below `slow` are interpolated.

    Queries and keys are also multiplied by `attention`, if not given 0.1 ln(factor) + 1. truncate: the bounds of the
    channels between are whole numbers. Source: Peng et al., arXiv:2309.00071.
    """

    factor: float = field(converter=base, validator=_longer)
    original: int
    fast: float = 32.0
    slow: float = 1.0
    attention: float | None = None
    truncate: bool = True

    def __attrs_post_init__(self) -> None:
        if not 0 < self.slow < self.fast:
            raise ShapeError(f"slow channels turn less than fast ones: slow={self.slow} must be below fast={self.fast}")

    @property
    def magnitude(self) -> float:
        """What queries and keys are multiplied by."""
        return temper(self.factor) if self.attention is None else self.attention

    def stretch(self, speeds: tuple[float, ...], theta: float) -> tuple[float, ...]:
        """The angles per position, from those that it was trained on."""
        n = len(speeds)
        first, last = (n * log(self.original / (t * 2 * pi)) / log(theta) for t in (self.fast, self.slow))
        if self.truncate:
            first, last = floor(first), ceil(last)
        first, last = max(first, 0), min(last, 2 * n - 1)
        last += 0.001 if first == last else 0
        kept = (1 - min(1.0, max(0.0, (i - first) / (last - first))) for i in range(n))
        return tuple(s * (k + (1 - k) / self.factor) for s, k in zip(speeds, kept, strict=True))


def temper(factor: float, scale: float = 1.0) -> float:
    """YaRN's correction of attention's temperature for a sequence `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * scale * log(factor) + 1.0


@frozen
class Rope(Op):
    """Rotate pairs of channels by angles of position / theta^(2i/channels), the first `channels` of them (all if None).

    The pairs are the first half with the second, as in GPT-NeoX and Llama, or each even channel with the next one when
    interleaved, as in GPT-J. Source: Su et al., arXiv:2104.09864.
    """

    theta: float = field(converter=base)
    channels: int | None = None
    interleaved: bool = False
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None
    arity: ClassVar[int] = 1

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.theta, (int, float)) or not self.theta > 1:
            raise ShapeError(f"a rotary base of {self.theta!r}: it takes a number above 1, such as 10_000")
        if self.channels is not None and (self.channels < 2 or self.channels % 2):
            raise ShapeError(
                f"cannot rotate {self.channels} channels: rotary positions pair them, so 2, 4, 6, ... work"
            )

    def shape(self, *args: Shape) -> Shape:
        (x,) = args
        n = self.turned(x)
        if n % 2:
            raise ShapeError(f"cannot rotate {x}: rotary positions pair channels, so head_dim must be even")
        if n > x["head_dim"].known:
            raise ShapeError(f"cannot rotate {n} channels of {x}\nchannels can be up to {x['head_dim'].known}")
        return x

    def turned(self, x: Shape) -> int:
        """How many channels of each head turn."""
        return x["head_dim"].known if self.channels is None else self.channels

    def speeds(self, channels: int) -> tuple[float, ...]:
        """The angle between one position and the next for each pair of channels, in radians."""
        speeds = tuple(self.theta ** (-2 * i / channels) for i in range(channels // 2))
        return speeds if self.scaling is None else self.scaling.stretch(speeds, self.theta)

    @property
    def magnitude(self) -> float:
        """What the turned channels are multiplied by."""
        return 1.0 if self.scaling is None else self.scaling.magnitude
