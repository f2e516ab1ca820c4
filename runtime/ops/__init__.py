"""The torch code of ops, one file for each family: on whole tensors, on local shards, and at one new position.

Importing this package imports the files of all families, which register their ops (see `registry`).
"""

from . import (  # noqa: F401
    attention,
    delta_rule,
    elementwise,
    lookups,
    losses,
    norms,
    products,
    rotary,
    routing,
    sequence,
    shapes,
)
from .registry import first_state, local, next_position, whole

__all__ = ["first_state", "local", "next_position", "whole"]
