"""The one kind of error that is the user's to mend."""

from __future__ import annotations


class UserError(ValueError):
    """A wrong input, said in one message: what is wrong, where, and what would work.

    The commands print it without a traceback and exit with status 2. Our own invariants
    are assertions instead.
    """
