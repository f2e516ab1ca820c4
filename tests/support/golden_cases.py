"""Lists the searches whose results are recorded: model, cluster, workload and fixed layout fields."""

from __future__ import annotations

from typing import Any

from attrs import frozen

# A layout with nothing left to search; `pinned` overrides some of it.
PLAIN: dict[str, Any] = {
    "dp": 1,
    "tp": 1,
    "pp": 1,
    "vpp": 1,
    "cp": 1,
    "ep": 1,
    "etp": 1,
    "sequence_parallel": False,
    "micro_batch_size": 1,
    "recompute": "none",
    "recompute_modules": [],
    "recompute_layers": 0,
    "microbatch_group_size": 0,
    "distributed_optimizer": True,
    "overlap": ["gradient_reduce", "parameter_gather"],
}


@frozen(kw_only=True)
class Case:
    """One search. `fixed` holds layout fields by the names that the recorded JSON uses."""

    name: str
    model: str
    cluster: str
    seq: int
    batch: int
    precision: str
    runtime: str
    fixed: dict[str, Any]


def case(
    model: str, cluster: str, seq: int, batch: int, precision: str = "bf16", runtime: str = "megaloom", **fixed: Any
) -> Case:
    """Return a search that may choose all layout fields but the fixed ones."""
    words = [model, cluster, f"seq={seq}", f"batch={batch}", precision, runtime]
    words += [f"{field}={_word(value)}" for field, value in fixed.items()]
    return _made(" ".join(words), model, cluster, seq, batch, precision, runtime, fixed)


def pinned(
    model: str, cluster: str, seq: int, batch: int, precision: str = "bf16", runtime: str = "megaloom", **fixed: Any
) -> Case:
    """Return a case with every layout field fixed: it prices one layout."""
    words = ["pinned", model, cluster, f"seq={seq}", f"batch={batch}", precision, runtime]
    words += [f"{field}={_word(value)}" for field, value in fixed.items()]
    return _made(" ".join(words), model, cluster, seq, batch, precision, runtime, PLAIN | fixed)


def _made(
    name: str, model: str, cluster: str, seq: int, batch: int, precision: str, runtime: str, fixed: dict[str, Any]
) -> Case:
    return Case(
        name=name,
        model=model,
        cluster=cluster,
        seq=seq,
        batch=batch,
        precision=precision,
        runtime=runtime,
        fixed=fixed,
    )


def _word(value: Any) -> str:
    return "+".join(value) or "none" if isinstance(value, list) else str(value)


# These run in the ordinary test suite.
QUICK = [
    case("stdlib-gpt", "4xCPU", 128, 32, "fp32"),
    case("gpt2", "8xA100", 1024, 64, "fp16"),
    case("llama3-8b", "8xH100", 8192, 64),
    case("llama3-8b", "32xH100", 131072, 8, runtime="megatron", cp=8),
    case("llama3-70b", "64xH100", 8192, 128, "fp8", "megatron"),
    case("mixtral-8x7b", "32xH100", 4096, 256, ep=8),
    case("deepseek-v2-lite", "16xH800", 4096, 256, runtime="megatron", overlap=["gradient_reduce", "expert_parallel"]),
    case("gemma2-9b", "6xH200", 4096, 48),
    case("mamba2-1-3b", "8xA100", 2048, 64),
    case("t5-base", "8xA100", 512, 64, pp=2),
    case("llava-7b", "8xH100", 2048, 32, recompute="full"),
    case("vit-base", "8xA100-40GB", 1, 256),
    pinned("llama2-7b", "24xA100", 4096, 32, dp=4, tp=2, pp=3, vpp=2, micro_batch_size=1, microbatch_group_size=4),
    pinned("gpt3-1-3b", "8xA100", 2048, 64, dp=2, pp=4, recompute="full", recompute_layers=3, micro_batch_size=2),
    pinned("mixtral-8x7b", "16xH100", 4096, 64, dp=16, ep=8, etp=2, recompute="full"),  # all-to-all between nodes
    case("llama3-70b", "8xA100", 8192, 16),  # nothing fits
]

SEARCHES = [
    case("bart-base", "4xA100", 1024, 64),
    case("bart-large", "8xV100", 1024, 128, "fp16", pp=2),
    case("bart-base", "2xCPU", 128, 8, "fp32"),
    case("bert-base", "8xV100", 512, 256, "fp16"),
    case("bert-large", "16xA100", 512, 256, runtime="megatron"),
    case("bert-large-pre-norm", "8xA100-PCIe", 512, 64, tp=2),
    case("bloom-560m", "4xCPU", 256, 16),
    case("bloom-7b", "16xA100", 2048, 128, "fp16"),
    case("bloom-176b", "384xA100", 2048, 2048, tp=4),
    case("deepseek-v2-lite", "8xH100", 4096, 128),
    case("deepseek-v2", "128xH800", 4096, 1024, pp=8, ep=8),
    case("deepseek-v3", "2048xH100", 4096, 8192, runtime="megatron"),
    case("deepseek-v3", "1024xB200", 4096, 8192, "mxfp8", "megatron", tp=1),
    case("deepseek-v3-mtp", "512xH800", 4096, 4096, "fp8", "megatron", pp=16),
    case("gemma2-2b", "8xA100", 8192, 32),
    case("gemma2-27b", "32xH100", 8192, 64, runtime="megatron"),
    case("gemma3-1b", "4xA100", 4096, 32),
    case("gemma3-12b", "24xH100", 8192, 48),
    case("gemma3-27b", "32xH200", 32768, 32, cp=4),
    case("gpt2", "4xCPU", 256, 16),
    case("gpt2-medium", "3xA100", 1024, 48),
    case("gpt2-large", "8xV100", 1024, 64, "fp16", recompute="selective"),
    case("gpt2-xl", "8xH100", 1024, 64, runtime="megatron"),
    case("gpt2-xl", "6xA100", 1024, 96, distributed_optimizer=False),
    case("gpt3-125m", "2xCPU", 256, 8, "fp32"),
    case("gpt3-6-7b", "16xA100", 2048, 128, overlap=[]),
    case("gpt3-13b", "32xH100", 2048, 256, "fp8", "megatron"),
    case("gpt3-175b", "1024xH100", 2048, 1536),
    case("gpt3-175b", "96xA100", 2048, 96, runtime="megatron", tp=8, pp=12),
    case("gpt-oss-20b", "8xH100", 4096, 64),
    case("gpt-oss-20b", "16xB200", 8192, 64, "mxfp8", "megatron"),
    case("gpt-oss-120b", "64xH100", 4096, 256, ep=16),
    case("llama2-7b", "8xA100", 4096, 64),
    case("llama2-7b", "8xA800", 4096, 64, runtime="megatron", recompute="selective", recompute_modules=["mlp"]),
    case("llama2-13b", "16xA100-40GB", 4096, 128),
    case("llama2-70b", "64xA100", 4096, 128, runtime="megatron", tp=8, overlap=["gradient_reduce", "tensor_parallel"]),
    case("llama3-1b", "4xA100-PCIe-40GB", 2048, 16),
    case("llama3-1b", "1xA100", 2048, 8),
    case("llama3-8b", "16xH100", 8192, 128, "fp8", "megatron"),
    case("llama3-8b", "8xH100", 8192, 64, recompute="full"),
    case("llama3-8b", "32xGB200", 8192, 128, "nvfp4", "megatron"),
    case("llama3-8b", "72xGB300", 8192, 144, "fp8", "megatron"),
    case("llama3-8b", "8xB300", 8192, 64, pp=4, vpp=4),
    case("llama3-1-8b", "64xH100", 131072, 16),
    case("llama3-1-70b", "128xH100", 32768, 64, cp=4, runtime="megatron"),
    case("llama3-70b", "64xH200", 8192, 128),
    case("llama3-405b", "1024xH100", 8192, 2048),
    case("llama3-405b", "576xGB200", 8192, 1152, "fp8", "megatron"),
    case("llava-7b", "8xA100", 2048, 64, pp=2),
    case("llava-13b", "16xH100", 2048, 128),
    case("mamba2-130m", "2xCPU", 256, 8, "fp32"),
    case("mamba2-2-7b", "16xH100", 4096, 64, runtime="megatron"),
    case("mistral-7b", "8xH100", 8192, 64),
    case("mistral-7b-v3", "8xH100", 32768, 16, cp=2),
    case("mistral-24b", "32xH100", 8192, 64, runtime="megatron"),
    case("mixtral-8x7b", "64xH100", 4096, 256, "fp8", "megatron"),
    case("mixtral-8x7b", "32xA100", 4096, 128, tp=2, etp=2),
    case("mixtral-8x7b", "32xH100", 32768, 32, cp=2, ep=8, etp=1),
    case("mixtral-8x22b", "128xH100", 4096, 256, runtime="megatron"),
    case("nemotron4-15b", "32xH100", 4096, 128),
    case("nemotron4-340b", "768xH100", 4096, 2304, runtime="megatron"),
    case("minitron-8b", "8xH100", 4096, 64, tp=4, sequence_parallel=True),
    case("nemotron-h-8b", "16xH100", 8192, 64),
    case("nemotron-h-8b", "8xH200", 8192, 64, "fp8", "megatron"),
    case("own-layer", "4xCPU", 64, 8, "fp32"),
    case("own-layer", "8xA100", 128, 64),
    case("own-module", "4xCPU", 64, 8, "fp32"),
    case("own-module", "8xA100", 128, 64, tp=2),
    case("qwen2-5-0-5b", "4xA100", 4096, 32),
    case("qwen2-5-7b", "8xH100", 8192, 64, runtime="megatron"),
    case("qwen2-5-32b", "32xH800", 8192, 64),
    case("qwen2-5-72b", "96xH100", 8192, 96),
    case("qwen3-0-6b", "4xCPU", 128, 8),
    case("qwen3-8b", "8xH100", 8192, 64, micro_batch_size=2),
    case("qwen3-30b-a3b", "32xH100", 4096, 256, runtime="megatron", ep=8),
    case("qwen3-235b-a22b", "256xH100", 4096, 1024, runtime="megatron"),
    case("starcoder-1b", "8xA100", 8192, 32),
    case("starcoder-15b", "32xA100", 8192, 128, runtime="megatron"),
    case("stdlib-gpt", "2xCPU", 128, 16, "fp32", pp=2),
    case("stdlib-gpt", "6xCPU", 128, 24),
    case("t5-small", "4xCPU", 128, 16, "fp32"),
    case("t5-11b", "32xA100", 512, 256),
    case("t5-v1-1-xl", "16xH100", 1024, 64, tp=2),
    case("vit-large", "16xH100", 1, 1024),
    case("vit-huge", "4xCPU", 1, 16, "fp32"),
    case("llama3-405b", "64xH100", 8192, 64, runtime="megatron"),  # nothing fits
    case("llama2-7b", "8xA100", 4096, 64, tp=3),  # nothing is legal
]

PINNED = [
    pinned("gpt2", "4xA100", 1024, 32, dp=2, tp=2, micro_batch_size=4),
    pinned("gpt2", "5xA100", 1024, 40, pp=5, micro_batch_size=1),  # 12 blocks on 5 stages
    pinned("llama3-8b", "8xH100", 8192, 32, tp=2, pp=4, sequence_parallel=True, distributed_optimizer=True),
    pinned("llama3-8b", "24xH100", 8192, 64, dp=4, pp=6, micro_batch_size=1),  # 32 blocks on 6 stages
    pinned("llama3-8b", "16xH100", 8192, 64, "fp8", "megatron", dp=4, tp=2, pp=2, vpp=4, sequence_parallel=True),
    pinned(
        "llama3-8b",
        "32xH100",
        8192,
        64,
        dp=4,
        tp=2,
        pp=4,
        vpp=4,
        microbatch_group_size=8,
        recompute="selective",
        recompute_modules=["core_attn"],
    ),
    pinned("llama3-1-8b", "16xH100", 65536, 8, tp=4, cp=4, sequence_parallel=True, recompute="full"),
    pinned("gpt3-13b", "16xA100", 2048, 64, tp=4, pp=4, recompute="full", recompute_layers=5, sequence_parallel=True),
    pinned("gpt3-1-3b", "8xV100", 2048, 32, "fp16", dp=4, pp=2, overlap=[], distributed_optimizer=False),
    pinned("mixtral-8x7b", "32xH100", 4096, 128, dp=8, pp=4, ep=8, vpp=2),
    pinned("mixtral-8x7b", "32xH100", 4096, 128, dp=8, tp=4, ep=4, etp=4, sequence_parallel=True, recompute="full"),
    pinned(
        "deepseek-v2-lite",
        "16xH100",
        4096,
        128,
        runtime="megatron",
        dp=8,
        pp=2,
        ep=8,
        recompute="selective",
        recompute_modules=["layernorm", "moe_act"],
    ),
    pinned("deepseek-v3", "256xH800", 4096, 1024, runtime="megatron", dp=16, pp=16, ep=16, recompute="full"),
    pinned("t5-base", "6xA100", 512, 48, dp=2, pp=3, micro_batch_size=4),
    pinned("qwen2-5-7b", "24xH100", 8192, 36, runtime="megatron", dp=2, tp=4, pp=3, sequence_parallel=True),
    pinned("nemotron-h-8b", "16xH100", 8192, 64, dp=2, tp=2, pp=4, sequence_parallel=True),
]

CASES = QUICK + SEARCHES + PINNED
