"""Declaring and planning never load torch, the oracle never megatron-core; the command line waits until it must."""

import subprocess
import sys

from tests.support.limits import LIMIT

LOAD = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for info in pkgutil.walk_packages(getattr(module, "__path__", ()), name + "."):
        if ".scripts." not in info.name:  # programs may train
            importlib.import_module(info.name)
print(*{name.partition(".")[0] for name in sys.modules})
"""


def loaded(*names: str) -> set[str]:
    """The top-level packages in memory after importing these ones, with all their modules, in a fresh process."""
    done = subprocess.run([sys.executable, "-c", LOAD, *names], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_declaring_and_planning_do_without_torch() -> None:
    assert not {"torch", "megatron"} & loaded("megaloom.dsl", "megaloom.planner", "megaloom.examples")


def test_the_runtime_is_named_without_loading_torch() -> None:
    assert not {"torch", "megatron"} & loaded("megaloom.runtime.cli.main")


def test_the_oracle_and_the_torch_code_of_ops_do_without_megatron_core() -> None:
    assert "megatron" not in loaded("megaloom.runtime.ops", "megaloom.runtime.reference")
