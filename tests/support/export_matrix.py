"""Plans that the exports are tested on: every field of a layout, each family, and what a target alone can express."""

from __future__ import annotations

from typing import Any

from megaloom.dsl import Model, graph
from megaloom.dsl.catalog import examples, find
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.export.decoder import read_decoder
from megaloom.planner.export.target import Target
from tests.support.exported import CASES, case, plan_with
from tests.support.models.examples import example

# One example of each family that Megatron-LM may express.
FAMILIES = ("deepseek", "gpt2", "gpt3", "llama2", "llama3", "mistral", "mixtral", "nemotron", "qwen2", "qwen3")
EXPORTED = {ref.partition(":")[0].rpartition(".")[2]: name for name, ref in reversed([*examples().items()])}
LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "one device": (Layout(), {}),
    "no overlap": (Layout(dp=8, shard="optimizer", overlaps=()), {}),
    "overlap of the step": (Layout(dp=4, tp=2, sequence_parallel=True, overlaps=("gradients", "tensor")), {}),
    "replicated sequences": (Layout(dp=4, tp=2), {}),
    "first layers": (Layout(dp=4, pp=2, recompute="full", recompute_layers=3), {"counts": (16, 16)}),
    "modules": (Layout(dp=8, recompute="selective", recompute_modules=("layernorm", "mlp")), {}),
    "groups": (Layout(dp=2, pp=4, vpp=2, microbatch_group=5), {"counts": (4,) * 8}),
    "uneven": (Layout(dp=4, pp=2), {"counts": (17, 15)}),
    "first stage without layers": (Layout(dp=4, pp=2), {"counts": (0, 32)}),
    "sharded weights": (Layout(dp=8, shard="weights"), {}),
    "sharded gradients": (Layout(dp=8, shard="gradients"), {}),
    "replicas": (Layout(dp=8, shard="weights", replicas=2), {}),
    "gradients in bf16": (Layout(dp=8, shard="optimizer", grad_reduce="bf16"), {}),
    "vocabulary": (Layout(dp=4, tp=2, vocab_multiple=64), {}),
    "fp32": (Layout(dp=8), {"precision": "fp32"}),
    "fp16": (Layout(dp=8), {"precision": "fp16"}),
    "fp8": (Layout(dp=8), {"precision": "fp8"}),
    "sharded weights in fp8": (Layout(dp=8, shard="weights"), {"precision": "fp8"}),
    "sharded gradients in fp8": (Layout(dp=8, shard="gradients"), {"precision": "fp8"}),
    "sharded weights in mxfp8": (Layout(dp=8, shard="weights"), {"precision": "mxfp8", "gpus": "8xB200"}),
    "sharded weights and gradients in bf16": (Layout(dp=8, shard="weights", grad_reduce="bf16"), {}),
    "mxfp8": (Layout(dp=8), {"precision": "mxfp8", "gpus": "8xB200"}),
    "nvfp4": (Layout(dp=8), {"precision": "nvfp4", "gpus": "8xB200"}),
}
EXPERTS: dict[str, Layout] = {
    "ep": Layout(dp=8, ep=8, shard="optimizer"),
    "etp as tp": Layout(dp=4, tp=2, ep=2, etp=2, sequence_parallel=True),
    "etp 1": Layout(dp=4, tp=2, ep=4, sequence_parallel=True),
    "experts' overlap": Layout(dp=8, ep=8, overlaps=("gradients", "experts")),
}
WHOLE = {"tp": 2, "sequence_parallel": True}
STEP = {"shard": "weights", "reshard": "step"}
# Plans that torchtitan or Accelerate can express: they have few models, and shard in their own ways.
OWN: dict[str, tuple[str, Layout, dict[str, Any]]] = {
    "replicated": ("llama3-8b", Layout(dp=8), {"batch": 8}),
    "one micro-batch": ("llama3-8b", Layout(dp=8, shard="gradients"), {"batch": 8}),
    "optimizer of one micro-batch": ("llama3-8b", Layout(dp=8, shard="optimizer"), {"batch": 8}),
    "tensors": ("llama3-8b", Layout(dp=4, shard="weights", **WHOLE), {}),
    "context": ("llama3-8b", Layout(dp=4, cp=2, shard="weights"), {}),
    "stages": ("llama3-8b", Layout(dp=2, pp=2, micro_batch=2, **STEP), {"counts": (17, 15)}),
    "chunks": ("llama3-8b", Layout(dp=2, pp=2, vpp=2, shard="optimizer"), {"counts": (9, 8, 8, 7)}),
    "recompute": ("qwen3-8b", Layout(dp=8, shard="weights", recompute="full"), {}),
    "fp32": ("qwen3-8b", Layout(dp=8, shard="weights"), {"precision": "fp32"}),
    "experts": ("qwen3-30b-a3b", Layout(dp=8, ep=8, shard="weights"), {}),
    "experts divided": ("qwen3-30b-a3b", Layout(dp=4, ep=4, etp=2, shard="weights", vocab_multiple=1, **WHOLE), {}),
    "experts whole": ("qwen3-30b-a3b", Layout(dp=4, ep=4, shard="weights", vocab_multiple=1, **WHOLE), {}),
    "tied": ("qwen3-4b", Layout(dp=8, shard="weights"), {}),
    "tensors alone": ("llama3-8b", Layout(tp=8, sequence_parallel=True, vocab_multiple=1), {}),
    "tensors whole": ("llama3-8b", Layout(dp=4, tp=2, shard="weights"), {}),
    "small": ("llama3-1b", Layout(dp=8, shard="weights"), {}),
    "stages of qwen3": ("qwen3-8b", Layout(dp=2, pp=2, micro_batch=2, **STEP), {"counts": (17, 19)}),
    "wide experts": ("qwen3-30b-a3b", Layout(dp=4, ep=8, shard="weights", vocab_multiple=1, **WHOLE), {}),
    "gpt2": ("gpt2", Layout(dp=2, pp=2, micro_batch=2, shard="optimizer", **WHOLE), {"counts": (6, 6), "seq": 1024}),
    "gpt2 recompute": ("gpt2-medium", Layout(dp=2, pp=2, recompute="full"), {"counts": (13, 11), "seq": 1024}),
    "gpt2 first": ("gpt2", Layout(dp=2, recompute="full", recompute_layers=3), {"seq": 1024}),
    "gpt2 in fp16": ("gpt2", Layout(dp=2), {"precision": "fp16", "seq": 1024}),
    "gpt2 in bf16": ("gpt2", Layout(dp=2, overlaps=(), vocab_multiple=64, grad_reduce="bf16"), {"seq": 1024}),
}
MATRIX = (
    *CASES,
    *(f"family {name}" for name in FAMILIES),
    *(f"layout {name}" for name in LAYOUTS),
    *(f"experts {name}" for name in EXPERTS),
    *(f"own {name}" for name in OWN),
)


def planned(name: str) -> tuple[Plan, Model]:
    """Return a plan of the matrix, and its model."""
    kind, _, rest = name.partition(" ")
    if kind == "family":
        model = example(EXPORTED[rest])
        return plan_with(model, Layout(dp=8), seq=read_decoder(graph(model), Target.MEGATRON_LM).positions or 64), model
    if kind == "layout":
        model, ref = find("llama3-8b")
        layout, more = LAYOUTS[rest]
        return plan_with(model, layout, ref=ref, batch=160, **more), model
    if kind == "experts":
        model, ref = find("mixtral-8x7b")
        return plan_with(model, EXPERTS[rest], ref=ref), model
    if kind == "own":
        example_name, layout, more = OWN[rest]
        model, ref = find(example_name)
        return plan_with(model, layout, ref=ref, **{"batch": 64, **more}), model
    return case(name)
