"""The arguments of Megatron-LM that describe a model, as its parser stores them in a checkpoint.

Those of a decoder are for pretrain_gpt.py, others for pretrain_bert.py and pretrain_t5.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from attrs import frozen

from megaloom.dsl import Graph, MoE
from megaloom.dsl.sharding_table import Split, padded_vocabulary

from .decoder import DecoderModel, read_decoder
from .encoder import read_bert, read_t5
from .megatron_lm import model_options
from .option import Option, option
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
    "moe_layer_freq": 1,
    "num_query_groups": 1,
    "qk_layernorm": False,
    "rotary_interleaved": False,
    "rotary_percent": 1.0,
    "squared_relu": False,
    "swiglu": False,
    "untie_embeddings_and_output_weights": False,
}
"""Arguments of a model that Megatron-LM reads from a checkpoint, where no option says otherwise."""


READ = """num_layers hidden_size ffn_hidden_size seq_length num_attention_heads num_query_groups group_query_attention
kv_channels max_position_embeddings position_embedding_type rotary_base rotary_percent rotary_interleaved
add_bias_linear add_qkv_bias squared_relu swiglu untie_embeddings_and_output_weights apply_layernorm_1p
normalization attention_dropout hidden_dropout num_experts moe_layer_freq moe_ffn_hidden_size moe_router_topk
moe_token_dispatcher_type moe_router_pre_softmax moe_shared_expert_intermediate_size moe_router_score_function
moe_router_enable_expert_bias moe_router_topk_scaling_factor"""
"""Arguments that --use-checkpoint-args reads. Source: Megatron-LM core_v0.16.1, megatron/training/checkpointing.py."""
OF_ITSELF = (option("norm-epsilon", 1e-5), option("make-vocab-size-divisible-by", 128))
"""Options that have the values of their defaults."""


@frozen
class MegatronArguments:
    """Arguments by their names in Megatron-LM, and the options among them that it does not read from a checkpoint."""

    stored: dict[str, object]
    unread: tuple[Option, ...]


def megatron_arguments(graph: Graph, *, seq: int, vocab_multiple: int) -> MegatronArguments:
    """Return the arguments of a decoder. Raise UserError for what Megatron-LM cannot express.

    seq: tokens per sequence. vocab_multiple: the number that the vocabulary is padded to a multiple of.
    """
    return _arguments(read_decoder(graph, Target.MEGATRON_LM), seq, vocab_multiple)


def bert_arguments(graph: Graph, *, seq: int, vocab_multiple: int) -> MegatronArguments:
    """Return the arguments of a BERT: with token types, Megatron-LM's has a head for the next sentence.

    seq, vocab_multiple: see `megatron_arguments`. Raise UserError that names a layer which BertModel does not have.
    """
    bert = read_bert(graph)
    own = () if bert.types else (option("bert-no-binary-head"),)
    return _arguments(bert.layers, seq, vocab_multiple, {"bert_binary_head": bert.types}, own)


def t5_arguments(graph: Graph, *, seq: int, vocab_multiple: int) -> MegatronArguments:
    """Return the arguments of a T5.

    seq, vocab_multiple: see `megatron_arguments`. Raise UserError that names a layer which T5Model does not have.
    """
    t5 = read_t5(graph).layers
    layers = {f"{side}_num_layers": len(t5.layers) for side in ("encoder", "decoder")}
    lengths = {f"{side}_seq_length": seq for side in ("encoder", "decoder")}
    return _arguments(t5, seq, vocab_multiple, {**layers, **lengths}, (option("decoder-seq-length", seq),))


def _arguments(
    m: DecoderModel,
    seq: int,
    vocab_multiple: int,
    more: Mapping[str, object] = MappingProxyType({}),
    own: tuple[Option, ...] = (),
) -> MegatronArguments:
    """Return the arguments of a model, and those that it has besides a decoder's."""
    arguments, unread = dict(DEFAULTS), list(own)
    for one in model_options(m, seq, vocab_multiple, Target.MEGATRON_LM):
        name = NEGATED.get(one.name, one.name.replace("-", "_"))
        values = [_typed(value) for value in one.values] or [one.name not in NEGATED]
        arguments[name] = values[0] if len(values) == 1 else values
        if name not in READ.split() and one not in OF_ITSELF:
            unread.append(one)
    if m.moe and m.dense:
        arguments["moe_layer_freq"] = [int(isinstance(ff, MoE)) for ff in m.layers]
    padded = padded_vocabulary(m.vocab, Split(vocab_multiple=vocab_multiple))
    stored = {**arguments, **more, "vocab_size": m.vocab, "padded_vocab_size": padded}
    return MegatronArguments(stored, tuple(unread))


def _typed(value: str) -> object:
    """Return the number that the text of an option is, or the text."""
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value
