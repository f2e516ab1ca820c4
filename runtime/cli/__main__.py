"""Entry point of the program `megaloom`, and of `python -m megaloom.runtime.cli`."""

import sys

from megaloom.runtime.cli.address_space import within_address_space
from megaloom.runtime.launch.stop_signals import until_stopped


def run_program() -> int:
    """Run the command, and return its exit code. Signals are heard from here on, while the command line is imported."""
    return until_stopped(lambda: within_address_space(_run))


def _run() -> int:
    from .main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(run_program())
