"""The arguments of Megatron-LM's pretrain_gpt.py that describe a model, as its parser stores them in a checkpoint."""

from __future__ import annotations

from megaloom.dsl import Graph, Unembed
from megaloom.dsl.sharding_table import Split, padded_vocabulary

from .decoder import read_decoder
from .megatron_lm import model_options
from .target import Target

NEGATED = {
    "disable-bias-linear": "add_bias_linear",
    "no-bias-gelu-fusion": "bias_gelu_fusion",
    "no-rope-fusion": "apply_rope_fusion",
}
"""Options that set an argument of another name to False."""
DEFAULTS: dict[str, object] = {
    "add_bias_linear": True,
    "add_position_embedding": True,
    "add_qkv_bias": False,
    "apply_layernorm_1p": False,
    "group_query_attention": False,
    "num_query_groups": 1,
    "qk_layernorm": False,
    "rotary_interleaved": False,
    "rotary_percent": 1.0,
    "squared_relu": False,
    "swiglu": False,
    "untie_embeddings_and_output_weights": False,
}
"""Arguments of a model that Megatron-LM reads from a checkpoint, where no option says otherwise."""


def megatron_arguments(graph: Graph, *, seq: int, vocab_multiple: int) -> dict[str, object]:
    """Return the arguments of a decoder by their names in Megatron-LM. Raise UserError for what it cannot express.

    seq: tokens per sequence. vocab_multiple: the number that the vocabulary is padded to a multiple of.
    """
    arguments = dict(DEFAULTS)
    for option in model_options(read_decoder(graph, Target.MEGATRON_LM), seq, vocab_multiple, Target.MEGATRON_LM):
        if option.name in NEGATED:
            arguments[NEGATED[option.name]] = False
            continue
        values = [_typed(value) for value in option.values] or [True]
        arguments[option.name.replace("-", "_")] = values[0] if len(values) == 1 else values
    vocab = next(n.op.table["vocab"].known for n in graph.nodes if isinstance(n.op, Unembed))
    padded = padded_vocabulary(vocab, Split(vocab_multiple=vocab_multiple))
    return {**arguments, "vocab_size": vocab, "padded_vocab_size": padded}


def _typed(value: str) -> object:
    """Return the number that the text of an option is, or the text."""
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value
