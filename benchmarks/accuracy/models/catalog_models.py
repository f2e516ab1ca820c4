"""Published models that are examples of megaloom, by their names, also as Hugging Face writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache

from attrs import frozen

from megaloom.dsl.catalog import examples, find
from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Model, graph
from megaloom.planner.model.requirements import model_requirements

# Parts of a name beside family and size: owner, tuning, version of the weights, context length.
_SUFFIX = re.compile(r"^.*/|^(meta|nvidia)(?=-)|-(base|instruct|chat|hf|it|pt|v0-[12]|\d+k)(?=-|$)")
ALSO: Mapping[str, str] = {
    "llama31405b": "llama3-405b",
    "llama321b": "llama3-1b",
    "mistral7bv03": "mistral-7b-v3",
    "bloom": "bloom-176b",
}


@frozen
class NamedModel:
    """A model of the examples, with its number of blocks and of experts."""

    name: str
    model: Model
    layers: int
    experts: int


@lru_cache(maxsize=64)
def named_example(name: str) -> NamedModel:
    """Return the example that a name means, also as Hugging Face writes it. Raises UserError for an unknown name."""
    plain, known = _plain(name), {_plain(example): example for example in examples()}
    example = known.get(plain) or ALSO.get(plain)
    if not example:
        near = get_close_matches(plain, known, 1, 0.8)
        meant = f"; did you mean {known[near[0]]}?" if near else ""
        raise UserError(f"{name or 'the field `model` is missing: it'} is not an example of megaloom{meant}")
    model, _ = find(example)
    required = model_requirements(graph(model))
    experts = max((n for dim, n in required.sizes("ep") if dim == "experts"), default=0)
    return NamedModel(example, model, required.blocks, experts)


def _plain(name: str) -> str:
    """Return family and size alone, without separators."""
    plain = re.sub(r"[ ._]", "-", name.strip().lower())
    while plain != (less := _SUFFIX.sub("", plain).strip("-")):
        plain = less
    return plain.replace("-", "")
