"""Shared by the tests of the runtime: what ranks import is imported once, before they are forked."""

import importlib

import pytest

from megaloom.runtime.megatron import device


@pytest.fixture(scope="session", autouse=True)
def modules_of_ranks() -> None:
    """Import what most ranks need, so that a forked rank does not spend 0.2 s on it."""
    device.prepare()
    for name in ("engine.engine", "checkpoints.checkpoint"):
        importlib.import_module(f"megaloom.runtime.{name}")
