"""Entry point of the program `megaloom`, and of `python -m megaloom.runtime.cli`."""

import os
import sys

from megaloom.runtime.cli.address_space import within_address_space
from megaloom.runtime.launch.stop_signals import until_stopped

# Threads that wait sleep. If they spin, they take the cores from the threads that they wait for: a step of one process
# with two threads took 4.3 s beside other programs on two cores, and 0.34 s if they sleep. OpenMP reads this once, when
# torch is imported; ranks on CPU are forked from this process.
WAITING = ("OMP_WAIT_POLICY", "passive")


def run_program() -> int:
    """Run the command, and return its exit code. Signals are heard from here on, while the command line is imported."""
    os.environ.setdefault(*WAITING)
    return until_stopped(lambda: within_address_space(_run))


def _run() -> int:
    from .main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(run_program())
