"""Values of a row of the older schema of published runs, as numbers, text and truth values."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, nan
from typing import Any

from megaloom.planner.contract.choices import Module, Recompute, Shard

from .training_run import UnfitError

Row = Mapping[str, Any]
MAX_INTEGER = 2**31 - 1
MAX_EXPERTS = 10_000
# Words of `zero_stage`: a sharding strategy of torch, and Composer's mixed precision that is all in 16 bits.
ONLY_GRADIENTS, PURE = "SHARD_GRAD_OP", "PURE"
# Word of `recompute`: torch's selective activation checkpointing, under which a block keeps the results of some ops.
OP_CHECKPOINTING = "SAC"


def row_integer(row: Row, key: str, default: int | None = None, most: int = MAX_INTEGER) -> int:
    """Return a whole number of a row. A missing or empty field and 0 mean unknown: the default, if there is one."""
    value = row.get(key)
    if value in (None, "", 0) and not isinstance(value, bool):
        if default is None:
            raise UnfitError(f"no {key}")
        return default
    number = _number(value, key, "whole number")
    if number != int(number) or not 0 <= number <= most:
        raise UnfitError(f"{key} must be a whole number from 1 to {most:,}, got {value!r:.40}")
    return int(number) or row_integer({}, key, default)


def row_number(row: Row, key: str) -> float | None:
    """Return a positive number of a row, or None if it is missing."""
    value = row.get(key)
    if value in (None, "", 0) and not isinstance(value, bool):
        return None
    number = _number(value, key, "number")
    if number <= 0:
        raise UnfitError(f"{key} must be positive, got {value!r:.40}")
    return number


def row_text(row: Row, key: str) -> str:
    """Return a field of a row as text, empty if it is missing."""
    value = row.get(key)
    return "" if value is None else str(value)


def row_flag(row: Row, key: str, default: bool = False) -> bool:
    """Return a truth value of a row, also one written as text such as "true"."""
    value = row.get(key)
    return default if value in (None, "") else str(value).lower() not in ("false", "no", "0", "0.0")


def row_recompute(value: object) -> tuple[Recompute, tuple[Module, ...]]:
    """Return recompute mode and modules of "none", "full…", "selective:a,b" or a list of modules."""
    if isinstance(value, list):
        value = f"selective:{','.join(map(str, value))}" if value else "none"
    mode, _, names = str(value or "none").lower().partition(":")
    if mode.startswith("full") or OP_CHECKPOINTING.lower() in mode:
        return Recompute.FULL, ()
    if not mode.startswith("selective"):
        return Recompute.NONE, ()
    return Recompute.SELECTIVE, tuple(m for m in Module if {m, m.removeprefix("mla_")} & set(names.split(",")))


def row_shard(row: Row) -> Shard:
    """Return the state that a row shards: with FSDP weights or gradients, else the distributed optimizer's."""
    stage = row_text(row, "zero_stage")
    if ONLY_GRADIENTS in stage:
        return Shard.GRADIENTS
    if row_integer(row, "fsdp", 1) > 1 or "FSDP" in stage:
        return Shard.WEIGHTS
    return Shard.OPTIMIZER if row_flag(row, "dist_optimizer", default=True) else Shard.NONE


def _number(value: object, key: str, kind: str) -> float:
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else nan
    except (ValueError, OverflowError):
        number = nan
    if not isfinite(number):
        raise UnfitError(f"{key} must be a {kind}, got {value!r:.40}")
    return number
