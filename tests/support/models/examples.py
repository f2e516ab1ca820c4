"""The models of `examples/`, of which a process builds each once."""

from functools import cache

from megaloom.dsl import Model
from megaloom.dsl.catalog import find


@cache
def example(name: str) -> Model:
    """Return the example of this name."""
    return find(name)[0]
