"""Models, of which a process builds each once: those of `examples/` by name, others by reference."""

from functools import cache

from megaloom.dsl import Model
from megaloom.dsl.catalog import find


def example(name: str) -> Model:
    """Return the example of this name."""
    return model_named(name)


@cache
def model_named(ref: str) -> Model:
    """Return the model of a reference. Ranks that are forked later have it too, and what is known of its graph."""
    return find(ref)[0]
