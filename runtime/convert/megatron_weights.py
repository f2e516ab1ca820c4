"""The weights of a decoder from a checkpoint of Megatron-LM's GPTModel, as views by the model's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path

from megaloom.dsl import (
    MLP,
    Attention,
    Embed,
    GeGLU,
    Graph,
    LayerNorm,
    Model,
    Node,
    Positions,
    RMSNorm,
    SwiGLU,
    Unembed,
    UserError,
    graph,
)
from megaloom.runtime.weights.views import View

from .megatron_files import LAYERS, megatron_tensors
from .run_weights import parameter_shapes, weights_of

FEED_FORWARD = (MLP, SwiGLU, GeGLU)
LISTED, NEAR = 5, 0.6
PADDED = ("word_embeddings.weight", "output_layer.weight", "output_layer.bias")


def read_megatron(path: Path, model: Model) -> dict[str, View]:
    """Return the weights of a model from the newest checkpoint of Megatron-LM in a folder.

    Raise UserError for a model that GPTModel is not, and for tensors that are missing, unknown or of another shape.
    """
    g = graph(model)
    places = dict(_places(g))
    tensors = megatron_tensors(path, gated=any(isinstance(n.op, SwiGLU | GeGLU) for n in g.nodes))
    wanted = {
        f"{prefix}{name}": (f"{node.name}.{name}", shape)
        for node, prefix in places.items()
        for name, shape in parameter_shapes(node).items()
    }
    if _is_tied(g):  # the last pipeline rank may have saved its copy of the table
        wanted.pop("output_layer.weight", None)
        tensors.pop("output_layer.weight", None)
    _check(path, model, wanted, tensors)
    return weights_of(g, {ours: tensors[theirs] for theirs, (ours, _) in wanted.items()})


def _is_tied(g: Graph) -> bool:
    """Return whether the table of the logits is that of the embedding."""
    return len({id(n.op.table) for n in g.nodes if isinstance(n.op, Embed | Unembed)}) == 1


def _places(g: Graph) -> Iterator[tuple[Node, str]]:
    """Yield the nodes with weights, each with the prefix of its tensors in GPTModel."""
    for n in g.nodes:
        if n.weights and n.block is None:
            yield n, _outside(n)
    blocks: dict[int, list[Node]] = {}
    for n in g.nodes:
        if n.weights and n.block is not None:
            blocks.setdefault(n.block, []).append(n)
    for i, nodes in enumerate(blocks.values()):
        kinds = [(RMSNorm, LayerNorm), (Attention,), (RMSNorm, LayerNorm), FEED_FORWARD]
        if len(nodes) != len(kinds) or not all(isinstance(n.op, k) for n, k in zip(nodes, kinds, strict=True)):
            odd = next((n for n, k in zip(nodes, kinds, strict=False) if not isinstance(n.op, k)), nodes[-1])
            raise _unknown(odd)
        parts = ("input_layernorm.", "self_attention.", "pre_mlp_layernorm.", "mlp.")
        yield from ((n, f"{LAYERS}{i}.{part}") for n, part in zip(nodes, parts, strict=True))


def _outside(n: Node) -> str:
    """Return the prefix of a node outside of the blocks."""
    match n.op:
        case Embed():
            return "embedding.word_embeddings."
        case Positions():
            return "embedding.position_embeddings."
        case RMSNorm() | LayerNorm():
            return "decoder.final_layernorm."
        case Unembed():
            return "output_layer."
    raise _unknown(n)


def _unknown(n: Node) -> UserError:
    return UserError(
        f"{n.name} is no layer of Megatron-LM's GPTModel whose tensor names are known\n"
        "decoders are read: norm, attention, norm and a dense feed-forward layer in each block"
    )


def _check(
    path: Path, model: Model, wanted: Mapping[str, tuple[str, tuple[int, ...]]], tensors: Mapping[str, View]
) -> None:
    """Raise UserError that names tensors which are missing, unknown or of another shape, with the nearest names."""
    lines = []
    missing, unknown = [n for n in wanted if n not in tensors], [n for n in tensors if n not in wanted]
    for what, names, others in (("missing", missing, unknown), ("unknown", unknown, missing)):
        for name in names[:LISTED]:
            near = get_close_matches(name, others, 1, NEAR)
            lines.append(f"{what}: {name}" + (f"; the nearest is {near[0]}" if near else ""))
        lines += [f"and {len(names) - LISTED} more are {what}"] if len(names) > LISTED else []
    for name, (_, shape) in wanted.items():
        if name in tensors and not _fits(name, tensors[name].shape, shape):
            lines.append(f"{name} has shape {list(tensors[name].shape)}, not {list(shape)}")
    if lines:
        shown = "\n".join(lines[: 3 * LISTED])
        raise UserError(f"{path}: the tensors are not those of model {model.name!r}\n{shown}")


def _fits(name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether a tensor has the shape of a parameter; the rows of a vocabulary may be padded."""
    padded = name.endswith(PADDED) and len(found) == len(shape) and found[0] > shape[0]
    return found[1:] == shape[1:] if padded else found == shape
