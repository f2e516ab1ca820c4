"""Names of the tensors of megatron-core's GPTModel, BertModel and T5Model on one rank, for a model of them."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from attrs import frozen

from megaloom.dsl import Attention, CrossAttention, Embed, Graph, Node, Unembed, UserError
from megaloom.planner.contract.module_kinds import Role, kinds_at, module_kind
from megaloom.runtime.checkpoints.version_2 import expressions, stored_weight
from megaloom.runtime.weights.views import View

BLOCK = {
    "input_layernorm.": Role.NORM,
    "self_attention.": Role.ATTENTION,
    "pre_mlp_layernorm.": Role.NORM,
    "mlp.": Role.FEED_FORWARD,
}
"""The layers of a block, by the prefix of their tensors."""
CROSS_BLOCK = {
    "input_layernorm.": Role.NORM,
    "self_attention.": Role.ATTENTION,
    "pre_cross_attn_layernorm.": Role.NORM,
    "cross_attention.": Role.CROSS_ATTENTION,
    "pre_mlp_layernorm.": Role.NORM,
    "mlp.": Role.FEED_FORWARD,
}
"""The layers of a block of T5's decoder."""

HEAD = {
    "dense.weight": "lm_head.dense.weight",  # transposed
    "dense.bias": "lm_head.dense.bias",
    "norm.scale": "lm_head.layer_norm.weight",
    "norm.shift": "lm_head.layer_norm.bias",
}
"""Weights of the layer that BertModel has before the logits, and their tensors."""


class Family(Enum):
    """The models of megatron-core whose names are known."""

    GPT = "GPTModel"
    BERT = "BertModel"
    T5 = "T5Model"


LEFT_OUT = {
    Family.GPT: (),
    Family.BERT: ("binary_head.", "pooler."),
    Family.T5: ("position_embeddings.", "output_layer."),
}
"""Begins of the names of tensors that are not read: of BERT's other tasks, and those that T5Model has twice."""


@frozen
class Parameter:
    """A tensor of megatron-core: its name, and how weights of the model make it up.

    expression: a rearrangement of views whose keys are the name of a weight, and the number of a copy or None.
    """

    name: str
    expression: View
    node: Node

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the sizes of the whole tensor, without padding."""
        return self.expression.shape


def family_of(g: Graph) -> Family:
    """Return the model of megatron-core that a graph may be: with cross-attention, T5; without a causal mask, BERT."""
    if any(isinstance(n.op, CrossAttention) for n in g.nodes):
        return Family.T5
    causal = all(n.op.causal for n in g.nodes if isinstance(n.op, Attention))
    return Family.GPT if causal else Family.BERT


def is_tied(g: Graph) -> bool:
    """Return whether the table of the logits is that of an embedding."""
    tables = {kind: {id(n.op.table) for n in g.nodes if isinstance(n.op, kind)} for kind in (Embed, Unembed)}
    return bool(tables[Embed] & tables[Unembed])


def megatron_parameters(g: Graph) -> list[Parameter]:
    """Return the tensors of a model in megatron-core. One that several nodes share is there for each of them.

    A tied table of logits has no tensor of its own. Raise UserError for a layer that these models do not have.
    """
    found = [p for node, prefix in _places(g).items() for p in _parameters(node, prefix)]
    tied = is_tied(g)
    return [p for p in found if not (tied and p.name.endswith("output_layer.weight"))]


def _parameters(node: Node, prefix: str) -> Iterator[Parameter]:
    """Yield the tensors of a node."""
    if _is_head(node):
        for slot in node.weights:
            view = stored_weight(slot, None)
            name = HEAD[slot.name.removeprefix(f"{node.name}.")]
            yield Parameter(name, view.T if view.ndim > 1 else view, node)
        return
    if isinstance(node.op, CrossAttention) and node.op.kv_heads not in (None, node.op.heads):
        raise _unknown(node)
    for name, view in expressions(node).items():
        yield Parameter(f"{prefix}{name}", view, node)


def _is_head(node: Node) -> bool:
    return {slot.name.removeprefix(f"{node.name}.") for slot in node.weights} == HEAD.keys()


def _places(g: Graph) -> dict[Node, str]:
    """Return the nodes with weights, each with the prefix of its tensors."""
    family, crosses, places = family_of(g), False, dict[Node, str]()
    blocks: dict[int, list[Node]] = {}
    for n in g.nodes:
        crosses |= isinstance(n.op, CrossAttention)
        if n.weights and n.block is not None:
            blocks.setdefault(n.block, []).append(n)
        elif n.weights:
            decodes = crosses if family is Family.T5 else family is Family.GPT
            places[n] = "" if _is_head(n) else _outside(n, "decoder" if decodes else "encoder", family)
    numbers = {"encoder": 0, "decoder": 0}
    for nodes in blocks.values():
        decodes = any(isinstance(n.op, CrossAttention) for n in nodes)
        block = CROSS_BLOCK if decodes else BLOCK
        pairs = zip(nodes, block.values(), strict=False)
        odd = next((n for n, role in pairs if not isinstance(n.op, kinds_at(role, named=True))), None)
        if odd or len(nodes) != len(block):
            raise _unknown(odd or nodes[-1])
        layers = "decoder" if decodes or family is Family.GPT else "encoder"
        places |= {n: f"{layers}.layers.{numbers[layers]}.{part}" for n, part in zip(nodes, block, strict=True)}
        numbers[layers] += 1
    return places


def _outside(n: Node, layers: str, family: Family) -> str:
    """Return the prefix of a node outside of the blocks."""
    kind = module_kind(n.op)
    match kind and kind.role:
        case Role.EMBEDDING:
            return f"embedding.{'tokentype' if n.inputs == ('types',) else 'word'}_embeddings."
        case Role.POSITIONS:
            return "embedding.position_embeddings."
        case Role.NORM:
            return f"{layers}.final_layernorm."
        case Role.LOGITS:
            return f"{'lm_head.' if family is Family.T5 else ''}output_layer."
    raise _unknown(n)


def _unknown(n: Node) -> UserError:
    return UserError(
        f"{n.name} is not a layer of Megatron-LM's GPTModel, BertModel or T5Model whose tensor names are known\n"
        "each block must have a norm, attention, a norm, and a feed-forward layer or a mixture of experts;\n"
        "in a decoder that reads an encoder, also a norm and cross-attention between them"
    )
