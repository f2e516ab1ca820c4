"""The weights of a model from a checkpoint of Megatron-LM's GPTModel or BertModel, as views by the model's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path

from attrs import frozen

from megaloom.dsl import (
    MLP,
    Attention,
    Embed,
    GeGLU,
    Graph,
    LayerNorm,
    Model,
    MoE,
    Node,
    Op,
    Positions,
    RMSNorm,
    SwiGLU,
    Unembed,
    UserError,
    graph,
)
from megaloom.runtime.checkpoints.version_2 import parameter_shapes, weights_of
from megaloom.runtime.weights.views import View

from .megatron_files import megatron_tensors

BLOCK = {
    "input_layernorm.": (RMSNorm, LayerNorm),
    "self_attention.": (Attention,),
    "pre_mlp_layernorm.": (RMSNorm, LayerNorm),
    "mlp.": (MLP, SwiGLU, GeGLU, MoE),
}
"""The layers of a block, by the prefix of their tensors."""

HEAD = {
    "dense.weight": "lm_head.dense.weight",  # transposed
    "dense.bias": "lm_head.dense.bias",
    "norm.scale": "lm_head.layer_norm.weight",
    "norm.shift": "lm_head.layer_norm.bias",
}
"""Weights of the layer that BertModel has before the logits, and their tensors."""

OTHER_TASKS = ("binary_head.", "pooler.")
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


@frozen
class Wanted:
    """A parameter of a model: its name and shape. transposed: the tensor has its dims in reverse order."""

    name: str
    shape: tuple[int, ...]
    transposed: bool = False


def read_megatron(path: Path, model: Model) -> dict[str, View]:
    """Return the weights of a model from the newest checkpoint of Megatron-LM in a folder.

    Raise UserError for a model that neither GPTModel nor BertModel is, and for tensors that are missing, unknown or of
    another shape.
    """
    g = graph(model)
    wanted = {name: it for node, prefix in _places(g).items() for name, it in _parameters(node, prefix)}
    tensors = megatron_tensors(path, gated=any(_is_gated(n.op) for n in g.nodes))
    if _is_tied(g):  # the last pipeline rank may have saved its copy of the table
        wanted.pop("output_layer.weight", None)
        tensors.pop("output_layer.weight", None)
    if _is_encoder(g):
        tensors = {name: view for name, view in tensors.items() if not name.startswith(OTHER_TASKS)}
    _check(path, model, wanted, tensors)
    return weights_of(g, {it.name: tensors[name].T if it.transposed else tensors[name] for name, it in wanted.items()})


def _is_gated(op: Op) -> bool:
    """Return whether a feed-forward layer, or the experts of a mixture, are gated units."""
    return _is_gated(op.expert) if isinstance(op, MoE) else isinstance(op, SwiGLU | GeGLU)


def _is_tied(g: Graph) -> bool:
    """Return whether the table of the logits is that of an embedding."""
    tables = {kind: {id(n.op.table) for n in g.nodes if isinstance(n.op, kind)} for kind in (Embed, Unembed)}
    return bool(tables[Embed] & tables[Unembed])


def _is_encoder(g: Graph) -> bool:
    """Return whether tokens read those after them, as in BertModel."""
    return any(isinstance(n.op, Attention) and not n.op.causal for n in g.nodes)


def _parameters(node: Node, prefix: str) -> Iterator[tuple[str, Wanted]]:
    """Yield the parameters of a node by the names of their tensors."""
    if _is_head(node):
        for slot in node.weights:
            name, shape = slot.name.removeprefix(f"{node.name}."), tuple(d.known for d in slot.dims)
            yield HEAD[name], Wanted(slot.name, shape[::-1], transposed=len(shape) > 1)
    else:
        for name, shape in parameter_shapes(node).items():
            yield f"{prefix}{name}", Wanted(f"{node.name}.{name}", shape)


def _is_head(node: Node) -> bool:
    return {slot.name.removeprefix(f"{node.name}.") for slot in node.weights} == HEAD.keys()


def _places(g: Graph) -> dict[Node, str]:
    """Return the nodes with weights, each with the prefix of its tensors."""
    layers = "encoder" if _is_encoder(g) else "decoder"
    places = {n: "" if _is_head(n) else _outside(n, layers) for n in g.nodes if n.weights and n.block is None}
    blocks: dict[int, list[Node]] = {}
    for n in g.nodes:
        if n.weights and n.block is not None:
            blocks.setdefault(n.block, []).append(n)
    for i, nodes in enumerate(blocks.values()):
        odd = next((n for n, kinds in zip(nodes, BLOCK.values(), strict=False) if not isinstance(n.op, kinds)), None)
        if odd or len(nodes) != len(BLOCK):
            raise _unknown(odd or nodes[-1])
        places |= {n: f"{layers}.layers.{i}.{part}" for n, part in zip(nodes, BLOCK, strict=True)}
    return places


def _outside(n: Node, layers: str) -> str:
    """Return the prefix of a node outside of the blocks."""
    match n.op:
        case Embed():
            return f"embedding.{'tokentype' if n.inputs == ('types',) else 'word'}_embeddings."
        case Positions():
            return "embedding.position_embeddings."
        case RMSNorm() | LayerNorm():
            return f"{layers}.final_layernorm."
        case Unembed():
            return "output_layer."
    raise _unknown(n)


def _unknown(n: Node) -> UserError:
    return UserError(
        f"{n.name} is not a layer of Megatron-LM's GPTModel or BertModel whose tensor names are known\n"
        "each block must have a norm, attention, a norm, and a feed-forward layer or a mixture of experts"
    )


def _check(path: Path, model: Model, wanted: Mapping[str, Wanted], tensors: Mapping[str, View]) -> None:
    """Raise UserError that names tensors which are missing, unknown or of another shape, with the nearest names."""
    lines = []
    missing, unknown = [n for n in wanted if n not in tensors], [n for n in tensors if n not in wanted]
    for what, names, others in (("missing", missing, unknown), ("unknown", unknown, missing)):
        for name in names[:LISTED]:
            near = get_close_matches(name, others, 1, NEAR)
            lines.append(f"{what}: {name}" + (f"; the nearest is {near[0]}" if near else ""))
        lines += [f"and {len(names) - LISTED} more are {what}"] if len(names) > LISTED else []
    for name, it in wanted.items():
        if name in tensors and not _fits(name, tensors[name].shape, it.shape):
            lines.append(f"{name} has shape {list(tensors[name].shape)}, not {list(it.shape)}")
    if lines:
        shown = "\n".join(lines[: 3 * LISTED])
        raise UserError(f"{path}: the tensors are not those of model {model.name!r}\n{shown}")


def _fits(name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether a tensor has the shape of a parameter; the rows of a vocabulary may be padded."""
    padded = name.endswith(PADDED) and len(found) == len(shape) and found[0] > shape[0]
    return found[1:] == shape[1:] if padded else found == shape
