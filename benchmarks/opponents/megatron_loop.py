"""A decoder trained by megatron-core alone, as its users write the loop. An opponent of `against_others`.

Run under torchrun with a `Task` and the layers as arguments: `te` are Transformer Engine's, `te-fp8` these in fp8,
`torch` are megatron-core's own, with torch's attention and norms in place of its slower ones. megatron-core expects
CUDA. On CPUs, where this script is only tested, megaloom stands in for it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.opponents.task import Task, measure, start

if (
    not torch.cuda.is_available()
):  # megatron-core expects CUDA: on CPUs, where only this script is tested, it is stood in for
    from megaloom.runtime.megatron import device as cpu

    cpu.prepare()

from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class TorchAttention(DotProductAttention):  # type: ignore[misc]
    """Causal attention by torch's fused kernel: [tokens, batch, heads, size] each."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *unused: object, **more: object) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        grouped = q.shape[1] != k.shape[1]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=grouped)
        return attended.permute(2, 0, 1, 3).flatten(2)


class TorchNorm:
    """Makes torch's RMS norm where megatron-core makes a norm."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object) -> nn.Module:
        norm = nn.RMSNorm(hidden_size, eps=eps)
        norm.weight.sequence_parallel = config.sequence_parallel
        return norm


def config_of(task: Task, layers: str) -> TransformerConfig:
    """Return megatron-core's settings of a task."""
    more: dict[str, Any] = {"fp8": "hybrid", "fp8_recipe": "tensorwise"} if layers == "te-fp8" else {}
    if task.experts:
        more |= {
            "num_moe_experts": task.experts,
            "moe_router_topk": task.top_k,
            "moe_ffn_hidden_size": task.ffn,
            "moe_grouped_gemm": layers != "torch",
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 1e-3,
            "moe_router_dtype": "fp32",
            "moe_permute_fusion": layers != "torch",
        }
    return TransformerConfig(
        num_layers=task.layers,
        hidden_size=task.hidden,
        ffn_hidden_size=task.ffn,
        num_attention_heads=task.heads,
        num_query_groups=task.kv_heads,
        kv_channels=task.head_size,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        qk_layernorm=task.qk_norm,
        add_bias_linear=False,
        bias_activation_fusion=torch.cuda.is_available(),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=task.tp,
        context_parallel_size=task.cp,
        expert_model_parallel_size=task.ep,
        sequence_parallel=task.tp > 1,
        apply_rope_fusion=layers != "torch",
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        cross_entropy_loss_fusion=torch.cuda.is_available(),
        cross_entropy_fusion_impl="native",
        **more,
    )


def block_of(task: Task, layers: str) -> Any:
    """Return the specification of the model's blocks."""
    if layers != "torch":
        experts = {"num_experts": task.experts or None, "moe_grouped_gemm": bool(task.experts)}
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(**experts, qk_layernorm=task.qk_norm)
    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=task.experts or None, qk_layernorm=task.qk_norm, normalization="RMSNorm"
    )
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = TorchNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = TorchAttention
    if task.qk_norm:
        attention.q_layernorm = attention.k_layernorm = TorchNorm
    return TransformerBlockSubmodules(layer_specs=[spec] * task.layers, layer_norm=TorchNorm)


def main() -> None:
    task, layers, device = Task.given(), sys.argv[2], start()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=task.tp, context_parallel_size=task.cp, expert_model_parallel_size=task.ep
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = config_of(task, layers)
    model = GPTModel(
        *(config, block_of(task, layers), task.vocab, task.seq),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=500_000,
    ).to(device)
    parameters = whole_parameters(model)
    overlapped = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True, **overlapped)
    chunk = DistributedDataParallel(config, ddp, Float16Module(config, model))
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-4,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        overlap_param_gather=True,
        clip_grad=1.0,
    )
    optimizer = get_megatron_optimizer(settings, [chunk])
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss
    config.no_sync_func, config.grad_sync_func = chunk.no_sync, chunk.start_grad_sync
    config.param_sync_func = chunk.start_param_sync
    tokens = task.seq // task.cp
    ids = torch.randint(task.vocab, (task.micro_batch, tokens + 1), device=device)
    positions = torch.arange(tokens, device=device).expand(task.micro_batch, -1)

    def mean_loss(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return losses.float().mean(), {}

    def forward_step(unused: object, chunk: nn.Module) -> tuple[Tensor, Any]:
        return chunk(ids[:, :-1], positions, None, labels=ids[:, 1:]), mean_loss

    def step() -> None:
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(()),
            model=chunk,
            num_microbatches=task.microbatches,
            seq_length=task.seq,
            micro_batch_size=task.micro_batch,
            forward_only=False,
        )
        optimizer.step()

    measure(step, device, parameters)


def whole_parameters(model: nn.Module) -> int:
    """Return the number of parameters of the model of which a rank holds shards."""
    tp, ep = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )

    def ranks(p: nn.Parameter) -> int:
        if not getattr(p, "allreduce", True):  # of an expert
            return ep
        return tp if getattr(p, "tensor_model_parallel", False) else 1

    return sum(p.numel() * ranks(p) for p in model.parameters())


if __name__ == "__main__":
    main()
