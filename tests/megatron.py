"""megatron-core 0.16.1 itself, asked whether it takes a layout.

Protocol: `refusal(case)` runs what a rank of a real job runs until its first layers have computed, with megatron-core's
own code and under torch's fake process group: parallel_state's groups, the micro-batch calculator, TransformerConfig
with its pipeline layout, attention, MLP and experts, DDP's buffers, the schedule, the division of the batch over cp.
The first thing that raises is the refusal, with the place where it does. What is not megatron-core's own: its CUDA-only
attention core gives back zeros, Transformer Engine's duplicated projection is a plain one, the vocabulary is padded as
callers do, and `validated` is what only they look at.
"""

from __future__ import annotations

import ast
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen

from megaloom.planner.layout import Layout, Precision, Recompute

from .drawn import HEAD_DIM, HIDDEN, KV_RANK, ROPE, Case, Decoder


@frozen
class Refusal:
    """Where megatron-core, or what a caller checks, gives up, and what it says."""

    where: str  # layers.py:1166
    said: str


def refusal(case: Case) -> Refusal | None:
    """What megatron-core raises, None if nothing."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.world)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _start(case)
    except Taken:
        return None
    except OtherError as error:
        return Refusal("parallel_state.py:743", str(error))
    except (AssertionError, ValueError, RuntimeError, IndexError) as error:
        return Refusal(_where(error), str(error).partition("\n")[0])
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    raise AssertionError("the schedule ran no micro-batch")


class Taken(Exception):  # noqa: N818 - nothing is wrong
    """The first micro-batch went through the first layers."""


class OtherError(Exception):
    """megatron-core's groups are others than the layout's."""


def _where(error: BaseException) -> str:
    """The innermost place in megatron-core, or in what its callers check, that is not the mere check of a division."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/megatron/core/" in frame.filename and frame.name not in ("divide", "ensure_divisibility")
    ]
    return _place(frames[-1].filename, frames[-1].lineno or 0) if frames else CALLERS


def _place(file: str, line: int) -> str:
    """A file, and where the statement begins that the line is of."""
    begins = max(start for start, end in _statements(file) if start <= line <= end)
    return f"{Path(file).name}:{begins}"


@cache
def _statements(file: str) -> tuple[tuple[int, int], ...]:
    found = (node for node in ast.walk(ast.parse(Path(file).read_text())) if isinstance(node, ast.stmt))
    return tuple((node.lineno, node.end_lineno or node.lineno) for node in found)


CALLERS = "Megatron-LM's validate_args"


def _start(case: Case) -> None:
    """A rank of a job, to its first micro-batch."""
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    x, d, work = case.layout, case.decoder, case.workload
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=x.tp,
        pipeline_model_parallel_size=x.pp,
        virtual_pipeline_model_parallel_size=x.vpp if x.vpp > 1 else None,
        context_parallel_size=x.cp,
        expert_model_parallel_size=x.ep,
        expert_tensor_parallel_size=x.etp,
        create_gloo_process_groups=False,
    )
    dp, edp = parallel_state.get_data_parallel_world_size(), parallel_state.get_expert_data_parallel_world_size()
    if (dp, edp) != (x.dp, x.edp):
        raise OtherError(f"the groups have dp {dp} and edp {edp}")
    validated(case)
    model_parallel_cuda_manual_seed(0)
    calculator = ConstantNumMicroBatchesCalculator(work.batch, x.micro_batch, dp, False, rank=1)
    chunk = _chunk(d, x, _config(d, x))
    get_forward_backward_func(x.pp, x.vpp if x.vpp > 1 else None)(
        forward_step_func=lambda *_: _first(case, chunk),
        data_iterator=[iter(())] * x.vpp,
        model=[chunk] * x.vpp,
        num_microbatches=calculator.get(),
        seq_length=work.seq,
        micro_batch_size=x.micro_batch,
    )


def validated(case: Case) -> None:
    """What only callers look at, after Megatron-LM's arguments.py."""
    positions, fp16 = case.decoder.positions, case.workload.precision is Precision.FP16
    assert case.layout.ep == 1 or not fp16, "Expert parallelism is not supported with fp16 training."
    assert not positions or positions >= case.workload.seq, "max_position_embeddings must be at least seq_length"


def _config(d: Decoder, x: Layout) -> Any:
    """TransformerConfig, of the same decoder under this layout."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    kind, latent = TransformerConfig, {}
    if d.latent:
        kind, latent = (
            MLATransformerConfig,
            {
                "q_lora_rank": None,
                "kv_lora_rank": KV_RANK,
                "qk_head_dim": HEAD_DIM,
                "qk_pos_emb_head_dim": ROPE,
                "v_head_dim": HEAD_DIM,
                "rope_type": "rope",
            },
        )
    full = {"recompute_method": "block", "recompute_num_layers": x.recompute_layers or d.layers}
    return kind(
        num_layers=d.layers,
        hidden_size=HIDDEN,
        num_attention_heads=d.heads,
        num_query_groups=d.kv_heads,
        kv_channels=HEAD_DIM,
        ffn_hidden_size=d.ff,
        gated_linear_unit=d.gated and not d.biased,
        add_bias_linear=d.biased,
        num_moe_experts=d.experts or None,
        moe_ffn_hidden_size=d.expert_ff or None,
        moe_shared_expert_intermediate_size=d.shared_ff or None,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
        moe_layer_freq=[int(i >= d.dense_layers) for i in range(d.layers)],
        mtp_num_layers=1 if d.ahead else None,
        tensor_model_parallel_size=x.tp,
        sequence_parallel=x.sequence_parallel,
        context_parallel_size=x.cp,
        pipeline_model_parallel_size=x.pp,
        virtual_pipeline_model_parallel_size=x.vpp if x.vpp > 1 else None,
        microbatch_group_size_per_vp_stage=x.microbatch_group or None,
        pipeline_model_parallel_layout=_dealt(d, x) if x.pp * x.vpp > 1 else None,
        expert_model_parallel_size=x.ep,
        expert_tensor_parallel_size=x.etp,
        recompute_granularity=None if x.recompute is Recompute.NONE else x.recompute.value,
        recompute_modules=list(x.modules) or None,
        moe_grouped_gemm=d.experts > 0,  # as callers set for bf16
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=x.vpp > 1,
        batch_p2p_comm=x.vpp == 1,
        cuda_graph_scope=[],
        perform_initialization=False,
        **full if x.full else {"recompute_num_layers": x.recompute_layers or None},
        **latent,
    )


def _dealt(d: Decoder, x: Layout) -> list[list[str]]:
    """The layers over the stages, as evenly as may be; some stay empty where there are more stages than layers."""
    stages: list[list[str]] = [[] for _ in range(x.pp * x.vpp)]
    stages[0].append("embedding")
    for i in range(d.layers):
        stages[i * len(stages) // d.layers].append("decoder")
    stages[-1] += ["mtp"] * d.ahead + ["loss"]
    return stages


class Core(torch.nn.Module):
    """Attention's core, which megatron-core has for CUDA alone: no division is left to it."""

    def __init__(self, *_: Any, v_channels: int = HEAD_DIM, **__: Any) -> None:
        super().__init__()
        self.width = v_channels

    def forward(self, query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return query.new_zeros(*query.shape[:2], query.shape[2] * self.width)


class Duplicated(torch.nn.Linear):
    """A projection that each rank has whole, which megatron-core has with Transformer Engine alone."""

    def __init__(self, n: int, out: int, **_: Any) -> None:
        super().__init__(n, out, bias=False)


def _chunk(d: Decoder, x: Layout, config: Any) -> Any:
    """A model chunk with one layer of each kind, in DDP's buffers."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import MegatronModule

    class Chunk(MegatronModule):
        """The layers by their names."""

        model_type = None

        def __init__(self) -> None:
            super().__init__(config)
            self.layers = torch.nn.ModuleDict({name: made() for name, made in _layers(d, config)})

        def set_input_tensor(self, tensor: Any) -> None:
            """Of another stage."""

    sharded = DistributedDataParallelConfig(use_distributed_optimizer=x.distributed_optimizer)
    return DistributedDataParallel(config, sharded, Chunk())


def _layers(d: Decoder, config: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import attention, mlp, multi_latent_attention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
    from megatron.core.transformer.spec_utils import ModuleSpec

    groups = ProcessGroupCollection.use_mpu_process_groups()
    linears = mlp.MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    vocab = config.tensor_model_parallel_size  # padded, as callers do
    kind = "learned_absolute" if d.positions else "rope"
    yield "embedding", lambda: LanguageModelEmbedding(config, vocab, d.positions, kind, tp_group=groups.tp)
    if d.latent:
        multi_latent_attention.TELinear, multi_latent_attention.HAVE_TE = Duplicated, False
        latent = multi_latent_attention.MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_kv_down_proj=Duplicated,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=Core,
            linear_proj=RowParallelLinear,
            kv_layernorm=IdentityOp,
        )
        yield "latent", lambda: multi_latent_attention.MLASelfAttention(config, latent, 1, pg_collection=groups)
    else:
        parts = attention.SelfAttentionSubmodules(ColumnParallelLinear, Core, RowParallelLinear)
        causal = AttnMaskType.causal
        yield "mix", lambda: attention.SelfAttention(config, parts, 1, causal, pg_collection=groups)
    if d.dense_layers or not d.experts:
        yield "dense", lambda: mlp.MLP(config, linears, ffn_hidden_size=d.ff, tp_group=groups.tp)
    if d.experts:
        shared = ModuleSpec(SharedExpertMLP, submodules=linears) if d.shared_ff else None
        experts = MoESubmodules(ModuleSpec(SequentialMLP, submodules=linears), shared)
        yield "experts", lambda: MoELayer(config, experts, 1, pg_collection=groups)


def _first(case: Case, chunk: Any) -> Any:
    """The first micro-batch through a layer of each kind. Raises Taken where nothing else does."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    x, layers = case.layout, chunk.module.layers
    tokens = torch.zeros(x.micro_batch, case.workload.seq, dtype=torch.int64)
    mine = get_batch_on_this_cp_rank({"tokens": tokens})["tokens"]
    h = layers["embedding"](mine, torch.zeros_like(mine))
    for name in ("mix", "dense"):
        h = layers[name](h, None)[0] if name == "mix" and name in layers else h
        h = layers[name](h)[0] if name == "dense" and name in layers else h
    if "experts" in layers:
        layers["experts"].router.forward = _routed  # fake ranks send no tokens
        layers["experts"](h)
    raise Taken


def _routed(*_: Any, **__: Any) -> Any:
    raise Taken
