"""The weights of a model from a checkpoint of Megatron-LM, as views by the model's names."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

from attrs import frozen

from megaloom.dsl import Attention, CrossAttention, Model, UserError, graph
from megaloom.planner.contract.module_kinds import is_gated
from megaloom.runtime.checkpoints.version_2 import unpadded, whole_weights
from megaloom.runtime.weights.views import View, solve

from .legacy_names import LegacyModel
from .megatron_files import megatron_tensors
from .megatron_names import LEFT_OUT, family_of, is_tied, megatron_parameters

LISTED, NEAR = 5, 0.6
PADDED = ("word_embeddings.weight", "output_layer.weight", "output_layer.bias")


@frozen
class MegatronWeights:
    """The newest checkpoint of Megatron-LM in a folder, as the initial weights of a run."""

    folder: Path

    def __str__(self) -> str:
        return f"{self.folder} (a checkpoint of Megatron-LM)"

    def check(self, model: Model) -> None:
        """Raise UserError unless the checkpoint has the tensors of a model."""
        try:
            self.of(model)
        except UserError as error:
            raise UserError(f"--from {error}") from None

    def notes(self, model: Model) -> list[str]:
        """Return what a user should know of the options of a model."""
        return ["only names and shapes of the tensors are compared: MODEL decides activation, epsilon and positions"]

    def of(self, model: Model) -> dict[str, View]:
        """Return the weights of a model without those of adapters."""
        return read_megatron(self.folder, model.without_adapters)


def read_megatron(path: Path, model: Model) -> dict[str, View]:
    """Return the weights of a model from the newest checkpoint of Megatron-LM in a folder.

    Raise UserError for a model that is no GPTModel, BertModel or T5Model, and for tensors that are missing, unknown or
    of another shape.
    """
    g = graph(model)
    family, parameters = family_of(g), megatron_parameters(g)
    wanted = {p.name: p.shape for p in parameters}
    heads = {n.op.heads for n in g.nodes if isinstance(n.op, Attention | CrossAttention)}
    legacy = LegacyModel(family, max(heads, default=1))
    tensors = megatron_tensors(path, gated=any(is_gated(n.op) for n in g.nodes), legacy=legacy)
    if is_tied(g):  # the last pipeline rank may have saved its copy of the table
        tensors = {name: view for name, view in tensors.items() if not name.endswith("output_layer.weight")}
    tensors = {name: view for name, view in tensors.items() if not name.startswith(LEFT_OUT[family])}
    _check(path, model, wanted, tensors)
    found: dict[tuple[str, int | None], View] = {}
    for p in parameters:
        whole = unpadded(tensors[p.name], p.shape, {0} if p.name.endswith(PADDED) else ())
        assert whole is not None, f"{p.name} has been checked"
        found |= solve(p.expression, whole)  # type: ignore[arg-type]
    return whole_weights(g, found)


def _check(path: Path, model: Model, wanted: Mapping[str, tuple[int, ...]], tensors: Mapping[str, View]) -> None:
    """Raise UserError that names tensors which are missing, unknown or of another shape, with the nearest names."""
    lines = []
    missing, unknown = [n for n in wanted if n not in tensors], [n for n in tensors if n not in wanted]
    for what, names, others in (("missing", missing, unknown), ("unknown", unknown, missing)):
        for name in names[:LISTED]:
            near = get_close_matches(name, others, 1, NEAR)
            lines.append(f"{what}: {name}" + (f"; the nearest is {near[0]}" if near else ""))
        lines += [f"and {len(names) - LISTED} more are {what}"] if len(names) > LISTED else []
    for name, shape in wanted.items():
        if name in tensors and not _fits(name, tensors[name].shape, shape):
            lines.append(f"{name} has shape {list(tensors[name].shape)}, not {list(shape)}")
    if lines:
        shown = "\n".join(lines[: 3 * LISTED])
        raise UserError(f"{path}: the tensors are not those of model {model.name!r}\n{shown}")


def _fits(name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether a tensor has the shape of a parameter; the rows of a vocabulary may be padded."""
    padded = name.endswith(PADDED) and len(found) == len(shape) and found[0] > shape[0]
    return found[1:] == shape[1:] if padded else found == shape
