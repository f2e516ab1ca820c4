"""Tokens to train on, the time for them and the price of a device, and how these are written: 1T, 30d, 2.5.

`TokenBudget.parse` reads the options of `plan`; `tokens_text` and `duration_text` write what it reads.
"""

from __future__ import annotations

import re
from decimal import Decimal
from math import inf

from attrs import Attribute, field, frozen

from megaloom.dsl.errors import UserError

HOUR, DAY = 3600, 86400  # seconds
MOST_TOKENS = 10**18  # more are a mistake of units or digits
MOST_SECONDS = 36525 * DAY  # a century
_COUNTS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_DURATIONS = {"h": HOUR, "d": DAY, "w": 7 * DAY}
_NUMBER = r"(\d{1,20}(?:\.\d{1,20})?(?:e\+?\d{1,2})?)"


def _positive_price(owner: TokenBudget, attribute: Attribute[float | None], price: float | None) -> None:
    if price is not None and not 0 < price < inf:
        raise UserError(f"--price must be a price per GPU-hour above 0, such as 2.5, got {price:g}")


@frozen(kw_only=True)
class TokenBudget:
    """Tokens to train on, the longest time for them, and the price of a device.

    Raises UserError for a value that is not above 0.
    """

    tokens: int = field()
    within_seconds: int | None = field(default=None)  # longest time that is wanted
    price: float | None = field(default=None, validator=_positive_price)  # currency units per device and hour

    @tokens.validator
    def _check_tokens(self, attribute: Attribute[int], tokens: int) -> None:
        if not 1 <= tokens <= MOST_TOKENS:
            raise UserError(f"--tokens must be from 1 to {tokens_text(MOST_TOKENS)}, got {tokens_text(tokens)}")

    @within_seconds.validator
    def _check_within(self, attribute: Attribute[int | None], seconds: int | None) -> None:
        if seconds is not None and not 1 <= seconds <= MOST_SECONDS:
            raise UserError(f"--within must be from 1 second to a century, got {seconds} seconds")

    @classmethod
    def parse(cls, tokens: str | None, within: str | None = None, price: float | None = None) -> TokenBudget | None:
        """Return what the options `--tokens`, `--within` and `--price` say; None without any of them.

        Raises UserError for a text that is no number of tokens or no duration, and for options without `--tokens`.
        """
        if tokens is None:
            for flag, value in (("--within", within), ("--price", price)):
                if value is not None:
                    raise UserError(f"{flag} has no effect without --tokens\ngive the tokens to train on: --tokens 1T")
            return None
        seconds = None if within is None else parse_duration(within, "--within")
        return cls(tokens=parse_tokens(tokens, "--tokens"), within_seconds=seconds, price=price)


def parse_tokens(text: str, flag: str) -> int:
    """Return the number of tokens that 300B, 15.6T, 1e12 or 1000000 names.

    Raises UserError with the flag's name for any other text, and for parts of a token.
    """
    match = re.fullmatch(rf"{_NUMBER}([kmbt]?)", text.strip(), re.ASCII | re.IGNORECASE)
    count = Decimal(match[1]) * _COUNTS.get(match[2].upper(), 1) if match else Decimal(0)
    if not 1 <= count <= MOST_TOKENS or count != int(count):
        raise UserError(f"{flag} must be a number of tokens such as 300B, 15.6T or 1e12, got {text!r:.40}")
    return int(count)


def tokens_text(tokens: int) -> str:
    """Return a number of tokens in the largest unit that it reaches, with all of its digits: 15.6T."""
    name = max((n for n, size in _COUNTS.items() if tokens >= size), key=_COUNTS.__getitem__, default="")
    value = Decimal(tokens) / _COUNTS.get(name, 1)
    return f"{value.normalize():f}{name}"


def parse_duration(text: str, flag: str) -> int:
    """Return the seconds that 12h, 30d or 2w names, to the nearest second.

    Raises UserError with the flag's name for any other text, and for durations of 0 or above a century.
    """
    match = re.fullmatch(rf"{_NUMBER}([hdw])", text.strip(), re.ASCII | re.IGNORECASE)
    seconds = Decimal(match[1]) * _DURATIONS[match[2].lower()] if match else Decimal(0)
    if not Decimal("0.5") < seconds <= MOST_SECONDS:
        raise UserError(f"{flag} must be a duration such as 12h, 30d or 2w, got {text!r:.40}")
    return round(seconds)


def duration_text(seconds: int) -> str:
    """Return a duration in whole days, or else in hours: 30d, 12h, 1.5h."""
    return f"{seconds // DAY}d" if seconds % DAY == 0 else f"{seconds / HOUR:.15g}h"
