"""This rank's part of megatron-core's models, as the arguments in a checkpoint describe them, and their logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor


@frozen
class CoreLayout:
    """Tensor, pipeline and expert parallelism."""

    tp: int = 1
    pp: int = 1
    ep: int = 1


def config_of(args: Any, layout: CoreLayout) -> Any:
    """Return megatron-core's configuration."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    experts = (
        {
            "num_moe_experts": args.num_experts,
            "moe_layer_freq": args.moe_layer_freq,
            "moe_ffn_hidden_size": args.moe_ffn_hidden_size,
            "moe_router_topk": args.moe_router_topk,
            "moe_router_score_function": getattr(args, "moe_router_score_function", "softmax"),
            "moe_router_enable_expert_bias": getattr(args, "moe_router_enable_expert_bias", False),
            "moe_router_topk_scaling_factor": getattr(args, "moe_router_topk_scaling_factor", None),
            "moe_shared_expert_intermediate_size": getattr(args, "moe_shared_expert_intermediate_size", None),
            "moe_router_load_balancing_type": args.moe_router_load_balancing_type,
            "moe_token_dispatcher_type": args.moe_token_dispatcher_type,
            "moe_router_dtype": args.moe_router_dtype,
            "expert_model_parallel_size": layout.ep,
        }
        if hasattr(args, "num_experts")
        else {}
    )
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        kv_channels=args.kv_channels,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        pipeline_dtype=torch.float32,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        add_bias_linear=args.add_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **experts,
    )


def core_model(kind: str, args: Any, layout: CoreLayout, stage: int) -> Any:
    """Return the part of a pipeline stage of GPTModel, BertModel or T5Model, as pretrain_*.py of Megatron-LM does."""
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec, encoder_model_with_local_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    config, multiple = config_of(args, layout), args.make_vocab_size_divisible_by * layout.tp
    vocab = args.padded_vocab_size if kind == "t5" else -(-args.vocab_size // multiple) * multiple
    options: dict[str, Any] = {
        "pre_process": stage == 0,
        "post_process": stage == layout.pp - 1,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "position_embedding_type": args.position_embedding_type,
        "parallel_output": False,
    }
    if kind == "bert":
        types, head = 2 if args.bert_binary_head else 0, {"add_binary_head": args.bert_binary_head}
        return BertModel(config, types, bert_layer_local_spec, vocab, args.max_position_embeddings, **head, **options)
    if kind == "t5":
        layers = encoder_model_with_local_spec(), decoder_model_with_local_spec()
        stacks = [TransformerBlockSubmodules([x] * config.num_layers, layer_norm=WrappedTorchNorm) for x in layers]
        return T5Model(config, config, *stacks, vocab, args.max_position_embeddings, **options)
    spec = get_gpt_layer_local_spec(normalization=args.normalization)
    if config.num_moe_experts:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=args.normalization)
    rotary = {"rotary_base": getattr(args, "rotary_base", 10000)}
    return GPTModel(config, spec, vocab, args.max_position_embeddings, **rotary, **options)


def loaded_logits(cases: list[tuple[str, Path, CoreLayout]], inputs: dict[str, Tensor]) -> list[Tensor | None]:
    """On each rank: load each checkpoint, run it stage after stage, and return the logits on the last stage.

    cases: the kind of model, the folder of its checkpoint, and the layout.
    """
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel

    out: list[Tensor | None] = []
    batch, seq = inputs["tokens"].shape
    for kind, folder, x in cases:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(x.tp, x.pp, expert_model_parallel_size=x.ep)
        tensor_parallel.model_parallel_cuda_manual_seed(5, force_reset_rng=True)
        stage, ranks = parallel_state.get_pipeline_model_parallel_rank(), dist.get_world_size() // x.pp
        args = dist_checkpointing.load_common_state_dict(str(folder))["args"]
        model = core_model(kind, args, x, stage).eval()
        model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), str(folder)), strict=False)
        hidden = torch.empty(seq, batch, args.hidden_size)
        if stage:
            dist.recv(hidden, dist.get_rank() - ranks)
            model.set_input_tensor([hidden])
        with torch.no_grad():
            result = _run(kind, model, inputs)
        if stage < x.pp - 1:
            dist.send(result.contiguous(), dist.get_rank() + ranks)
        out.append(result[..., : args.vocab_size] if stage == x.pp - 1 else None)
    return out


def _run(kind: str, model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return the logits of the last stage, and the hidden states of others."""
    tokens = inputs["tokens"]
    batch, seq = tokens.shape
    causal = torch.ones(seq, seq, dtype=torch.bool).triu(1)
    if kind == "bert":
        result: Any = model(tokens, torch.ones(batch, seq), inputs["types"])
        return result[0] if isinstance(result, tuple) else result
    if kind == "t5":
        seen = torch.zeros(batch, 1, seq, seq, dtype=torch.bool)
        return model(inputs["source_tokens"], tokens, seen, causal.expand(batch, 1, seq, seq), seen)
    return model(tokens, torch.arange(seq).expand(batch, seq), causal[None, None])
