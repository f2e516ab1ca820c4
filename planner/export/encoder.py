"""Read a graph as one of Megatron-LM's models with an encoder: BertModel, or T5Model.

Both are declared here as Megatron-LM computes them, with the sizes of the graph, and compared with it node by node.
`read_bert` and `read_t5` raise UserError for the first node that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any, NoReturn, TypeVar

from attrs import evolve, frozen

from megaloom.dsl import (
    MLP,
    Attention,
    CrossAttention,
    Dim,
    Dropout,
    Embed,
    Graph,
    Layer,
    LayerNorm,
    Linear,
    Model,
    Node,
    Op,
    Positions,
    Unembed,
    Value,
    chain,
    fn,
    graph,
    ids,
    model,
    packed,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.files.json_form import graph_to_json
from megaloom.dsl.ops.documents import DocumentIndices
from megaloom.dsl.show.formatting import declared

from .decoder import DecoderModel, describe
from .target import Target, refuse

INSTEAD = "write a Hugging Face folder with --to hf, or train it here"
TYPES = 2
"""Token types of Megatron-LM's BERT: it has them with the head for the next sentence only."""
_OpT = TypeVar("_OpT", bound=Op)


@frozen
class EncoderModel:
    """A BERT or T5 in the fields of a decoder, which have the same options, and whether it has token types."""

    layers: DecoderModel
    types: bool = False


@frozen
class MaskedHead(Layer):
    """norm(gelu(dense(x))), before BERT's logits of masked tokens."""

    norm: LayerNorm

    def body(self, x: Value, /, **side: Value) -> Value:
        return fn("gelu", x >> Linear(x["embed"], bias=True).named("dense")) >> self.norm.named("norm")


@frozen
class _Sizes:
    """Sizes and parts that all layers of a graph share, where it is a BertModel or a T5Model."""

    vocab: Dim
    positions: Dim
    embed: Dim
    layers: int  # of each stack
    norm: LayerNorm
    attention: Attention
    mlp: MLP
    dropout: tuple[Dropout, ...]  # none, or one
    types: int  # tables of token types
    tied: bool

    @property
    def feed_forward(self) -> Layer:
        return residual(self.norm, self.mlp, *self.dropout)

    def attends(self, attention: Layer) -> Layer:
        """Return the half of a layer that this attention is in."""
        return residual(self.norm, attention, *self.dropout)


def read_bert(g: Graph) -> EncoderModel:
    """Return a graph as BertModel. Raise UserError that names a layer which BertModel does not have."""
    s = _sizes(g, "BertModel")
    _compare(g, _bert(s), "BertModel")
    if s.types and (kinds := _tables(g, "types")[0]["vocab"].known) != TYPES:
        _refuse(f"{kinds} token types: its BertModel has {TYPES}")
    return EncoderModel(_as_decoder(g, s), types=s.types > 0)


def read_t5(g: Graph) -> EncoderModel:
    """Return a graph as T5Model. Raise UserError that names a layer which T5Model does not have."""
    if biased := next((n for n in g.nodes if isinstance(n.op, Attention) and n.op.relative), None):
        _refuse(
            f"{biased.name} with relative position biases and scale={biased.op.scale:g}: its T5Model multiplies scores "  # type: ignore[attr-defined]
            "by head_dim^-0.5, and adds biases with Transformer Engine only"
        )
    s = _sizes(g, "T5Model")
    crosses = sum(isinstance(n.op, CrossAttention) for n in g.nodes)
    if s.layers != 2 * crosses:
        _refuse(f"{s.layers - crosses} layers of the encoder and {crosses} of the decoder: its T5Model has as many")
    s = evolve(s, layers=crosses)
    _compare(g, _t5(s), "T5Model")
    return EncoderModel(_as_decoder(g, s))


def _bert(s: _Sizes) -> Model:
    """Return Megatron-LM's BERT: norms before the layers, and logits tied to the embedding."""
    table, positions = weight("words", s.vocab, s.embed), weight("positions", s.positions, s.embed)
    x = ids() >> Embed(table)
    if s.types:
        x = x + (ids("types") >> Embed(weight("types", Dim("vocab", TYPES), s.embed)))
    block = s.attends(evolve(s.attention, causal=False)) >> s.feed_forward
    x = x >> chain(Positions(positions), *s.dropout) >> repeat(s.layers, block) >> s.norm
    return model("bert", x >> MaskedHead(s.norm) >> Unembed(table, bias=True))


def _t5(s: _Sizes) -> Model:
    """Return Megatron-LM's T5 with learned positions: both stacks read one embedding."""
    table, positions = weight("words", s.vocab, s.embed), weight("positions", s.positions, s.embed)
    embedded = chain(Embed(table), Positions(positions), *s.dropout)
    a = s.attention
    cross = CrossAttention(heads=a.heads, head_dim=a.head_dim, bias=True, dropout=a.dropout)
    encoder = s.attends(evolve(a, causal=False)) >> s.feed_forward
    decoder = s.attends(evolve(a, causal=True)) >> s.attends(cross) >> s.feed_forward
    memory = ids("source_tokens", Dim("source")) >> embedded >> repeat(s.layers, encoder) >> s.norm
    x = ids() >> embedded >> repeat(s.layers, decoder).given(memory=memory) >> s.norm
    logits = Unembed(table, bias=True) if s.tied else Unembed(weight("head", s.vocab, s.embed))
    return model("t5", x >> logits)


def _sizes(g: Graph, name: str) -> _Sizes:
    """Return the sizes that a graph has if it is the model of this name, which `_compare` finds out."""
    attention, norm, mlp = _first(g, Attention, name), _first(g, LayerNorm, name), _first(g, MLP, name)
    words, positions = _first(g, Embed, name).table, _first(g, Positions, name).table
    drop = next((n.op for n in g.nodes if isinstance(n.op, Dropout)), None)
    return _Sizes(
        vocab=Dim("vocab", words["vocab"].known),
        positions=Dim("position", positions["position"].known),
        embed=Dim("embed", words["embed"].known),
        layers=sum(isinstance(n.op, Attention) for n in g.nodes),
        norm=LayerNorm(norm.eps),
        attention=Attention(heads=attention.heads, head_dim=attention.head_dim, bias=True, dropout=attention.dropout),
        mlp=MLP(mlp.ff, "gelu_tanh" if mlp.act == "gelu_tanh" else "gelu", bias=True),
        dropout=() if drop is None else (drop,),
        types=len(_tables(g, "types")),
        tied=_first(g, Unembed, name).table is words,
    )


def _first(g: Graph, kind: type[_OpT], name: str) -> _OpT:
    """Return the first layer of a kind."""
    found = next((n.op for n in g.nodes if isinstance(n.op, kind)), None)
    return found or _refuse(f"a model without {kind.__name__}: its {name} has it")


def _tables(g: Graph, source: str) -> list[Value]:
    """Return the tables of the embeddings that read an input."""
    return [n.op.table for n in g.nodes if isinstance(n.op, Embed) and n.inputs == (source,)]


def _as_decoder(g: Graph, s: _Sizes) -> DecoderModel:
    """Return the sizes as those of a decoder, for the options that both have."""
    return DecoderModel(
        name=g.name,
        vocab=s.vocab.known,
        embed=s.embed.known,
        tied=s.tied,
        positions=s.positions.known,
        dropout=s.dropout[0].rate if s.dropout else 0.0,
        norm=s.norm,
        attention=s.attention,
        layers=(s.mlp,) * s.layers,
        layer_starts=(),
        mtp=0,
        layer_per_block=True,
        std=g.std,
    )


def _compare(g: Graph, reference: Model, name: str) -> None:
    """Raise UserError that names the first node in which a graph differs from the model of this name."""
    has_documents = any(isinstance(n.op, DocumentIndices) for n in g.nodes)
    other = graph(packed(reference) if has_documents else reference)
    for ours, theirs in zip_longest(_forms(g), _forms(other)):
        if ours is None or theirs is None or ours[1] != theirs[1]:
            there = "the end" if theirs is None else declared(theirs[0].op)
            what = "a model that ends too early" if ours is None else describe(ours[0])
            if ours and theirs and declared(ours[0].op) == there:
                read, wanted = (" and ".join(n.inputs) for n in (ours[0], theirs[0]))
                _refuse(f"{what} of {read}: in its {name} it reads {wanted}, since norms stand before layers")
            _refuse(f"{what}: its {name} has {there} in this place")


def _forms(g: Graph) -> Iterator[tuple[Node, Any]]:
    """Yield the nodes of a graph without losses, each with what it computes of which nodes and weights, by number."""
    numbers: dict[tuple[str, str], int] = {}
    number: Callable[[str, str], int] = lambda kind, name: numbers.setdefault((kind, name), len(numbers))  # noqa: E731

    def numbered(form: Any) -> Any:
        if isinstance(form, list):
            return [numbered(item) for item in form]
        if not isinstance(form, dict):
            return form
        named = {"node", "weight"} & form.keys()
        return {k: number(k, v) if k in named and isinstance(v, str) else numbered(v) for k, v in form.items()}

    forms = {form["name"]: form for form in graph_to_json(g)["nodes"]}
    for n in g.nodes:
        if n.name in g.only_for_losses:
            continue
        form = forms[n.name]
        number("node", n.name)
        if n.is_input:
            yield n, form["kind"]
            continue
        inside = form.get("body") or [form["kind"], form.get("fields")]
        yield (
            n,
            [numbered(inside), numbered(form.get("inputs")), [number("weight", w) for w in form.get("weights", ())]],
        )


def _refuse(what: str) -> NoReturn:
    refuse(Target.MEGATRON_LM, what, INSTEAD)
