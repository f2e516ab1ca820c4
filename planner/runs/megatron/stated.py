"""The facts of a run of Megatron-LM as they are reported, each with the line that states it."""

from __future__ import annotations

from megaloom.planner.contract.choices import GradReduce
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Workload
from megaloom.planner.report.tables import active_overlaps
from megaloom.planner.runs.run import Devices, Stated

from .layers import has_experts, hidden_channels, layer_kinds, position_embedding
from .parser import Arguments
from .profile import fp16_gradients


def stated_facts(a: Arguments, x: Layout, work: Workload, vocab: int, devices: Devices) -> tuple[Stated, ...]:
    """Return the facts of the model, the layout and the workload. x, work: what the arguments were read as."""
    return (*_model(a, vocab), *_layout(a, x, devices), *_workload(a, x, work))


def _model(a: Arguments, vocab: int) -> list[Stated]:
    def row(name: str, value: object, *dests: str) -> Stated:
        return Stated("model", name, str(value), a.origin(*dests))

    heads, latent = a["num_attention_heads"], a["multi_latent_attention"]
    groups = a["num_query_groups"] if a["group_query_attention"] else heads
    out = [
        row("layers", a["num_layers"], "num_layers", "encoder_num_layers"),
        row("hidden size", a["hidden_size"], "hidden_size"),
        row("heads", heads, "num_attention_heads"),
    ]
    out += [
        row("latent attention", f"kv rank {a['kv_lora_rank']}", "kv_lora_rank", "multi_latent_attention")
        if latent
        else row("key/value heads", groups, "num_query_groups", "group_query_attention")
    ]
    act = next((n for n in ("swiglu", "squared_relu", "quick_geglu") if a[n]), "gelu")
    out += [
        row("ffn hidden size", hidden_channels(a), "ffn_hidden_size"),
        row("activation", act, act),
        row("norm", a["normalization"], "normalization"),
        row("positions", position_embedding(a), "position_embedding_type", "use_rotary_position_embeddings"),
        row("biases", "yes" if a["add_bias_linear"] else "no", "add_bias_linear"),
        row(
            "embeddings",
            "untied" if a["untie_embeddings_and_output_weights"] else "tied",
            "untie_embeddings_and_output_weights",
        ),
        row("vocabulary", vocab, "padded_vocab_size", "pad_vocab_size_to", "vocab_size", "tokenizer_type"),
    ]
    if has_experts(a):
        sparse = layer_kinds(a)
        out += [
            row("experts", f"{a['num_experts']} in {sum(sparse)} of {len(sparse)} layers", "num_experts"),
            row("experts of a token", a["moe_router_topk"], "moe_router_topk"),
            row(
                "expert hidden size",
                a["moe_ffn_hidden_size"] or hidden_channels(a),
                "moe_ffn_hidden_size",
                "ffn_hidden_size",
            ),
        ]
        if a["moe_shared_expert_intermediate_size"]:
            size = a["moe_shared_expert_intermediate_size"]
            out.append(row("shared expert", size, "moe_shared_expert_intermediate_size"))
    if a["mtp_num_layers"]:
        out.append(row("multi-token prediction", a["mtp_num_layers"], "mtp_num_layers"))
    return out


def _layout(a: Arguments, x: Layout, devices: Devices) -> list[Stated]:
    def row(name: str, value: object, *dests: str) -> Stated:
        return Stated("layout", name, str(value), a.origin(*dests))

    chunked = (
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "pipeline_model_parallel_layout",
    )
    out = [
        Stated("layout", "GPUs", str(devices.count), devices.origin),
        row("tp", x.tp, "tensor_model_parallel_size"),
        row("pp", x.pp, "pipeline_model_parallel_size"),
        row("vpp", x.vpp, *chunked),
        row("cp", x.cp, "context_parallel_size"),
        row("dp", x.dp),
        row("sequence parallel", "yes" if x.sequence_parallel else "no", "sequence_parallel"),
        row("micro-batch", x.micro_batch, "micro_batch_size"),
        row(
            "recompute",
            x.recompute_text,
            "recompute_granularity",
            "recompute_activations",
            "moe_layer_recompute",
            "checkpoint_activations",
        ),
        row(
            "shard",
            x.shard,
            "data_parallel_sharding_strategy",
            "use_distributed_optimizer",
            "use_megatron_fsdp",
            "zero_stage",
        ),
    ]
    if has_experts(a):
        out += [
            row("ep", x.ep, "expert_model_parallel_size"),
            row("etp", x.etp, "expert_tensor_parallel_size"),
        ]
    flags = ("overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap", "overlap_moe_expert_parallel_comm")
    out.append(row("overlap", active_overlaps(x), *flags))
    if x.grad_reduce is not GradReduce.FP32 or fp16_gradients(a):
        out.append(row("gradients", "as wide as weights", "grad_reduce_in_bf16", "main_grads_dtype", "fp16"))
    return out


def _workload(a: Arguments, x: Layout, work: Workload) -> list[Stated]:
    def row(name: str, value: object, *dests: str) -> Stated:
        return Stated("workload", name, str(value), a.origin(*dests))

    return [
        row("sequence", work.seq, "seq_length", "encoder_seq_length"),
        row("batch", work.batch, "global_batch_size", "rampup_batch_size"),
        row("precision", work.precision, "fp4", "fp8", "bf16", "fp16"),
    ]
