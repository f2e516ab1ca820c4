"""`lora`: low-rank adapters on the matrices that PEFT's target modules name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attrs import frozen

from megaloom.dsl.errors import UserError, did_you_mean
from megaloom.dsl.graph import Model, graph
from megaloom.dsl.layer import Layer
from megaloom.dsl.layers.attention import Attention
from megaloom.dsl.layers.moe import MoE
from megaloom.dsl.low_rank import LoRA
from megaloom.dsl.node import Node, Slot
from megaloom.dsl.transforms.adapters import adapted, matrices

from .architectures import fitting_readers
from .tensor_names import Names, Square, checkpoint_tensors

DEFAULT_RANK = 16
WEIGHT = ".weight"
QUERIES_AND_VALUES = frozenset("qv")  # of attention: what has adapters by default, as in PEFT


@frozen
class MatrixModule:
    """A module of a Hugging Face model that multiplies by a matrix, with the weights that the matrix is made of."""

    path: str  # such as model.layers.0.self_attn.q_proj
    slots: tuple[Slot, ...]
    node: Node

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of the weights in their layer."""
        return tuple(s.name.removeprefix(f"{self.node.name}.") for s in self.slots)

    def is_named(self, target: str) -> bool:
        """Return True if PEFT would adapt this module for a target."""
        return self.path == target or self.path.endswith(f".{target}")

    @property
    def target(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]


def lora(
    model: Model,
    rank: int = DEFAULT_RANK,
    alpha: float | None = None,
    *,
    targets: Iterable[str] | None = None,
    of: type[Layer] | tuple[type[Layer], ...] = Layer,
    names: Names | None = None,
) -> Model:
    """Return a model with low-rank adapters: W becomes W + (alpha / rank) A B, and all else is frozen.

    alpha: None is 2 rank. targets: names of matrices as Hugging Face and PEFT have them, such as q_proj, or c_attn in
    GPT-2; in a model of no known family the weights' own names, such as q. None: those of queries and values. of: the
    layers that have adapters. names: the tensor names of its family; None finds them. Raises UserError for a target
    that the model does not have, and for experts.
    """
    if model.lora is not None:
        raise UserError(f"model {model.name!r} has adapters already\nadd all of them at once")
    given = None if targets is None else tuple(dict.fromkeys(targets))
    modules = _modules(model, names, given or ())
    chosen = _default(model, modules) if given is None else given
    groups: dict[str, list[tuple[str, ...]]] = {}
    for target in chosen:
        found = [m for m in modules if m.is_named(target)]
        _check(model, target, found, modules)
        for m in (m for m in found if isinstance(m.node.op, of)):
            groups.setdefault(m.node.name, []).append(m.weights)
    if not groups:
        classes = " or ".join(c.__name__ for c in (of if isinstance(of, tuple) else (of,)))
        raise UserError(f"model {model.name!r} has no layer of class {classes} with {', '.join(chosen)}")
    order = graph(model).index
    nodes = {name: tuple(dict.fromkeys(groups[name])) for name in sorted(groups, key=order.__getitem__)}
    return adapted(model, LoRA(rank, 2 * rank if alpha is None else alpha, chosen, nodes))


def _modules(model: Model, names: Names | None, targets: tuple[str, ...]) -> list[MatrixModule]:
    """Return the modules that multiply by a matrix, under the names of the first family that has all targets.

    A model of no known family has one module for each matrix, with the names of node and weight; `q` is also `q_proj`.
    """
    families = [names] if names else [reader.names for reader in fitting_readers(model)]
    found = [list(matrix_modules(model, names)) for names in families] or [list(_own_modules(model))]
    return next((each for each in found if all(any(m.is_named(t) for m in each) for t in targets)), found[0])


def matrix_modules(model: Model, names: Names) -> Iterator[MatrixModule]:
    """Yield the modules of the Hugging Face model with these weights that multiply by a matrix."""
    owners = _owners(model)
    for t in checkpoint_tensors(names, model):
        plain = t.name.endswith(WEIGHT) and not any(isinstance(axis, Square) for axis in t.axes)
        if plain and all(s.name in owners for s in t.slots):
            yield MatrixModule(t.name.removesuffix(WEIGHT), t.slots, owners[t.slots[0].name])


def _own_modules(model: Model) -> Iterator[MatrixModule]:
    slots = graph(model).weights
    for name, node in _owners(model).items():
        for path in (name, f"{name}_proj") if name in slots else ():
            yield MatrixModule(path, (slots[name],), node)


def _owners(model: Model) -> dict[str, Node]:
    """Return the node of each matrix, by the name of the weight; matrices of experts included."""
    nodes = graph(model).nodes
    products = {f"{n.name}.{name}": n for n in nodes for _, name in matrices(n.value)}
    return products | {s.name: n for n in nodes for s in n.weights if s.outer}


def _default(model: Model, modules: list[MatrixModule]) -> tuple[str, ...]:
    """Return the targets of queries and values of attention. Raises UserError if there are none."""
    attention = [m for m in modules if isinstance(m.node.op, Attention) and QUERIES_AND_VALUES & set(m.weights)]
    if not attention:
        known = ", ".join(sorted({m.target for m in modules if not isinstance(m.node.op, MoE)}))
        raise UserError(
            f"model {model.name!r} has no attention with queries and values\nname targets: it has {known or 'none'}"
        )
    paths = {m.slots: m for m in attention}  # the last path of each matrix
    return tuple(dict.fromkeys(m.target for m in paths.values()))


def _check(model: Model, target: str, found: list[MatrixModule], modules: list[MatrixModule]) -> None:
    """Raise UserError unless a target names matrices that can have adapters."""
    if not found:
        known = sorted({m.target for m in modules if not isinstance(m.node.op, MoE)})
        raise UserError(
            f"model {model.name!r} has no matrix {target!r}{did_you_mean(target, known)}it has {', '.join(known)}"
        )
    for m in found:
        if isinstance(m.node.op, MoE) or any(s.outer for s in m.slots):
            raise UserError(
                f"target {target} is also the name of matrices of experts, {m.path}, which cannot have adapters\n"
                "name matrices of attention, such as q_proj,v_proj"
            )
