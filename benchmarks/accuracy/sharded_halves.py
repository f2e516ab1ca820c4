"""Halves of the runs with sharded weights: constants are fitted to one half, and the other half scores them.

The SHA-256 of a run's id says to which half it belongs. It was fixed before any constant was fitted.
"""

from __future__ import annotations

from hashlib import sha256


def in_fitted_half(id: str) -> bool:
    """Return True if constants may be fitted to the run of this id, False if it only scores them."""
    return sha256(id.encode()).digest()[-1] % 2 == 0
