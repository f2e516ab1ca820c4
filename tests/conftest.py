"""What all tests share: one thread a process, and no stopwatch on generated examples."""

import os
from typing import Any

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch starts: ranks and test workers share the cores

settings.register_profile("megaloom", deadline=None)  # the machine is busy with other tests: a slow example is no bug
settings.load_profile("megaloom")


def pytest_addoption(parser: Any) -> None:
    """--update writes golden files anew instead of comparing with them."""
    parser.addoption("--update", action="store_true", help="write golden files anew instead of comparing with them")
