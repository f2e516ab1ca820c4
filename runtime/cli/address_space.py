"""A command that the limit of its address space (`ulimit -v`) leaves no memory for imports."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable

GiB = 2**30


def within_address_space(command: Callable[[], int]) -> int:
    """Run a command, and return its exit code. Print one message if it ran out of memory for objects or libraries.

    Under a limit of the address space an import fails with MemoryError, ImportError or SystemError. Without such a
    limit, only MemoryError is of memory.
    """
    try:
        return command()
    except (MemoryError, ImportError, SystemError) as error:
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit == resource.RLIM_INFINITY and not isinstance(error, MemoryError):
            raise
        text = f": {error}" if str(error) else ""
        print(f"megaloom: out of memory ({type(error).__name__}{text})\n{_advice(limit)}", file=sys.stderr)
        return 2


def _advice(limit: int) -> str:
    if limit == resource.RLIM_INFINITY:
        return "end other programs, or use fewer --devices or a smaller --batch"
    return f"this process may use {limit / GiB:.1f} GiB of address space: raise the limit with `ulimit -v unlimited`"
