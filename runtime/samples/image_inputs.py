"""Images in samples: made-up ones, and the tokens of a text that images replace."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megaloom.dsl import Graph, MaskedScatter
from megaloom.dsl.facts.primitives import program


def picture(label: int, sizes: list[int], random: np.random.Generator) -> Tensor:
    """Return an image of a class: a pattern that the class determines, with noise."""
    pattern = np.random.Generator(np.random.Philox(label)).standard_normal(sizes)
    return torch.from_numpy((pattern + 0.5 * random.standard_normal(sizes)).astype(np.float32))


def image_tokens(graph: Graph) -> tuple[int, int]:
    """Return the id of the tokens that images replace, and their number in a sequence; (0, 0) without images."""
    for node in graph.nodes:
        for step in program(node).steps:
            if isinstance(op := step.value.op, MaskedScatter):
                return op.token, step.value.args[1].shape.positions("embed").known
    return 0, 0
