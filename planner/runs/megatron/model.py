"""The model that Megatron-LM's arguments describe, as a graph of layers."""

from __future__ import annotations

from itertools import groupby, pairwise

from megaloom.dsl import (
    Dim,
    Dropout,
    Embed,
    Graph,
    Join,
    Layer,
    Model,
    NextToken,
    Positions,
    Shift,
    Unembed,
    apply,
    ids,
    labels,
    model,
    repeat,
    residual,
    weight,
    weighted_sum,
)

from .layers import block_layers, norm, position_embedding
from .parser import Arguments
from .refusal import refuse_run

REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")


def build_model(a: Arguments, vocab: int, name: str = "run") -> Model:
    """Return the model. vocab: tokens before padding. Raise UserError for what is not modelled."""
    v, d = Dim("vocab", vocab), Dim("embed", a["hidden_size"])
    wte = weight("wte", v, d)
    head = weight("head", v, d) if a["untie_embeddings_and_output_weights"] else wte
    normed, drop = norm(a), _dropout(a)
    tokens = ids()
    x = tokens >> Embed(wte)
    x = x >> normed if a["embed_layernorm"] else x
    if (kind := position_embedding(a)) == "learned_absolute":
        x = x >> Positions(weight("wpe", Dim("position", _positions(a)), d))
    elif kind not in ("rope", "none", "alibi"):
        refuse_run(a, f"positions of the kind {kind} are not modelled", "position_embedding_type")
    for one in drop:
        x = x >> one
    blocks = [(residual(normed, mix, *drop), residual(normed, feed, *drop)) for mix, feed in block_layers(a)]
    for (mix, feed), equal in groupby(blocks):
        x = x >> repeat(len([*equal]), mix, feed)
    if not (ahead := a["mtp_num_layers"] or 0):
        return model(name, x >> normed >> Unembed(head) >> NextToken(), std=a["init_method_std"])
    y = labels()
    losses = [(1.0, x >> normed >> Unembed(head) >> NextToken(y))]
    last: tuple[Layer, Layer] = blocks[-1]
    for i in range(ahead):
        tokens = apply(Shift("seq", 1), tokens) if i else tokens
        x = x >> repeat(1, Join(wte, normed).given(tokens=tokens), *last)
        share = a["mtp_loss_scaling_factor"] / ahead
        losses.append((share, x >> normed >> Unembed(head) >> NextToken(y, offset=i + 1)))
    return model(name, weighted_sum(*losses), std=a["init_method_std"])


def _positions(a: Arguments) -> int:
    """Return the number of learned positions. Raise UserError for fewer than a sequence has."""
    seq = a["seq_length"] or a["encoder_seq_length"]
    positions: int = a["max_position_embeddings"] or seq
    if positions < seq:
        what = f"{positions} learned positions are fewer than the {seq} tokens of a sequence"
        refuse_run(a, f"{what}, so Megatron-LM does not start", "max_position_embeddings")
    return positions


def _dropout(a: Arguments) -> tuple[Dropout, ...]:
    return (Dropout(a["hidden_dropout"]),) if a["hidden_dropout"] else ()


def layer_starts(g: Graph) -> tuple[int, ...]:
    """Return the first node of each layer, layers of multi-token prediction included, and the first after them."""
    blocks = [node.block for node in g.nodes]
    return tuple(i for i, (a, b) in enumerate(pairwise(blocks), 1) if a != b)
