"""Findings on rules, search, messages of the planner, and readers of config.json."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.findings.finding import Verdict, finding, megaloom, passes, plan, refuses

OWN = """
from attrs import frozen
from megaloom.dsl import *
V, D = Dim("vocab", 256), Dim("embed", 48)
class Wide(Layer):
    def body(self, x, /, **side):
        f = Dim("ff", 14)
        return dot(dot(x, weight("up", x["embed"], f), "embed"), weight("down", f, x["embed"]), "ff")
def of(*layers):
    w = weight("wte", V, D)
    return model("m", ids() >> Embed(w) >> repeat(2, *layers) >> RMSNorm() >> Unembed(w) >> NextToken())
def wide() -> Model:
    return of(residual(RMSNorm(), Wide()))
def bigram() -> Model:
    w = weight("w", V, D)
    return model("bigram", ids() >> Embed(w) >> Unembed(w) >> NextToken())
def mamba() -> Model:
    return of(residual(RMSNorm(), Mamba2(heads=6, head_dim=16, state=16)))
def keys() -> Model:
    return of(residual(RMSNorm(), Attention(heads=3, kv_heads=1, head_dim=8)))
def mixture() -> Model:
    return of(residual(RMSNorm(), MoE(MLP(9), experts=4, top_k=2)))
"""
UNSTATED = """
@frozen
class RunningSum(Op):
    def shape(self, *args):
        return args[0]
"""
SMALL = ("--seq", "24", "--batch", "4", "--precision", "fp32")


def _verified(folder: Path, name: str, gpus: str, *options: str) -> str:
    """Plan a model of OWN under a layout, and verify the plan."""
    (folder / "own.py").write_text(OWN)
    passes(plan(folder, f"own.py:{name}", "--gpus", gpus, *SMALL, *options, "-o", "p.json"))
    return passes(megaloom(folder, "verify", "p.json"), "passed")


def _config(folder: Path, **fields: object) -> str:
    (folder / "config.json").write_text(json.dumps(fields))
    return "config.json"


@finding("parity rule tp-width", "Mamba-2 with one group gets no tp", Verdict.MENDED)
def groups(folder: Path) -> str:
    return _verified(folder, "mamba", "2xCPU", "--tp", "2")


@finding("parity rule tp-keys", "tp is refused by the channels of keys and values", Verdict.MENDED)
def keys(folder: Path) -> str:
    return _verified(folder, "keys", "3xCPU", "--tp", "3")


@finding("parity rule etp-width", "etp is refused by the width of experts that run by their body", Verdict.MENDED)
def width(folder: Path) -> str:
    return _verified(folder, "mixture", "4xCPU", "--tp", "2", "--etp", "2", "--ep", "2")


@finding("parity rule ep-fp16", "ep is refused in fp16", Verdict.MENDED)
def fp16(folder: Path) -> str:
    (folder / "own.py").write_text(OWN)
    small = ("--seq", "24", "--batch", "4", "--precision", "fp16")
    passes(plan(folder, "own.py:mixture", "--gpus", "2xCPU", *small, "--ep", "2", "-o", "p.json"))
    return passes(megaloom(folder, "verify", "p.json"), "passed")


@finding(
    "issue 22.3 own ops", "An op of a user's own that reads along the sequence is believed token-wise", Verdict.REFUSED
)
def own_op(folder: Path) -> str:
    (folder / "own.py").write_text(OWN + UNSTATED)
    return refuses(plan(folder, "own.py:bigram", "--gpus", "2xCPU", *SMALL), "RunningSum does not state reads")


@finding("newcomer A1", "A bigram model ends in a traceback of plan", Verdict.MENDED)
def bigram(folder: Path) -> str:
    return _verified(folder, "bigram", "2xCPU")


@finding("fuzz D3", "A model whose blocks have nothing to recompute ends in a traceback", Verdict.MENDED)
def nothing_to_recompute(folder: Path) -> str:
    (folder / "own.py").write_text(OWN)
    return passes(plan(folder, "own.py:bigram", "--gpus", "8xH100", "--seq", "128", "--batch", "64"), "bigram:")


@finding("fuzz D1", "V100 with fp32 and a model that does not fit: KeyError", Verdict.REFUSED)
def v100(folder: Path) -> str:
    return refuses(plan(folder, "llama3-70b", "--gpus", "8xV100", "--precision", "fp32"), "fits the memory")


@finding("fuzz D2", "`--vocab-multiple` has no range", Verdict.REFUSED)
def vocab_multiple(folder: Path) -> str:
    for value in ("-1", "0", "10000000000000000000"):
        seen = refuses(plan(folder, "gpt2", "--seq", "512", "--vocab-multiple", value), "vocab-multiple must be at")
    return seen


@finding("fuzz D10", "`plan --lint` computes with numbers out of range", Verdict.REFUSED)
def lint_ranges(folder: Path) -> str:
    refuses(plan(folder, "gpt2", "--pp", "0", "--tp", "1", "--lint"), "pp must be at least 1, got 0")
    refuses(plan(folder, "gpt2", "--batch", "10000000000000000000", "--tp", "2", "--lint"), "batch must be at most")
    return refuses(plan(folder, "gpt2", "--tp", "-1", "--lint"), "tp must be at least 1, got -1")


@finding("features D4", "`plan --lint` gives advice that changes nothing", Verdict.MENDED)
def lint_advice(folder: Path) -> str:
    ended = plan(folder, "llama3-8b", "--gpus", "64xH100", "--tp", "2", "--pp", "2", "--dp", "8", "--lint")
    return refuses(ended, "use --dp 16 instead of --dp 8")


@finding("users 9", "Gemma 3 with few layers, or layer_types other than 5:1, is refused", Verdict.MENDED)
def gemma3(folder: Path) -> str:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    fields = {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 4, "layer_types": kinds, "vocab_size": 64}
    return passes(megaloom(folder, "show", _config(folder, **sizes, **fields)), "parameters")


@finding("spotcheck N8", "A model_type with a hyphen names no architecture", Verdict.MENDED)
def hyphen(folder: Path) -> str:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    return passes(
        megaloom(folder, "show", _config(folder, model_type="megatron-bert", vocab_size=64, **sizes)), "param"
    )


@finding("spotcheck N10", "read(config object) ends in a bare TypeError", Verdict.MENDED)
def config_object(folder: Path) -> str:
    from transformers import GPT2Config

    from megaloom.dsl.hf.architectures import read

    return read(GPT2Config(n_layer=1, architectures=["GPT2LMHeadModel"])).name


@finding("users attention_bias", "Llama with attention_bias is refused", Verdict.MENDED)
def attention_bias(folder: Path) -> str:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    fields = {"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "attention_bias": True}
    return passes(megaloom(folder, "show", _config(folder, **sizes, **fields)), "parameters")


@finding("issue 22.16 dropout", "verify of a GPT-2 folder is refused for its attention dropout", Verdict.MENDED)
def dropout(folder: Path) -> str:
    sizes = {"n_layer": 1, "n_head": 4, "n_embd": 32, "n_positions": 32, "vocab_size": 64}
    config = _config(folder, architectures=["GPT2LMHeadModel"], **sizes)
    passes(plan(folder, config, "--gpus", "2xCPU", *SMALL, "--tp", "2", "-o", "p.json"))
    return passes(megaloom(folder, "verify", "p.json"), "dropout of fused attention was set to 0", "passed")


@finding("users 16", "A T5 v1.1 folder saved by transformers 5 is refused", Verdict.MENDED)
def t5(folder: Path) -> str:
    from megaloom.dsl import graph, read
    from megaloom.runtime.weights.hugging_face_weights import open_folder
    from tests.support.models.hugging_face import built

    built("t5-v1.1-tied").save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    assert (saved["tie_word_embeddings"], saved["scale_decoder_outputs"]) == (True, False)
    m = read(folder)
    open_folder(folder).check(m)
    assert "head" not in graph(m).weights
    return passes(megaloom(folder, "show", "."), "parameters")


@finding(
    "users mlp_bias", "Llama with mlp_bias, and Qwen3-MoE with layers without experts, are refused", Verdict.MENDED
)
def biases_and_dense_layers(folder: Path) -> str:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 64}
    llama = {"architectures": ["LlamaForCausalLM"], "intermediate_size": 48, "mlp_bias": True}
    passes(megaloom(folder, "show", _config(folder, **sizes, **llama)), "parameters")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "intermediate_size": 48}
    layers = {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    qwen = {"architectures": ["Qwen3MoeForCausalLM"], **experts, **layers}
    return passes(megaloom(folder, "show", _config(folder, **sizes, **qwen)), "parameters")


@finding("issue 22.11 fields", "A field that begins with _ is skipped, whatever it says", Verdict.REFUSED)
def underscore(folder: Path) -> str:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    fields = {"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "_logit_scale": 0.5}
    return refuses(megaloom(folder, "show", _config(folder, **sizes, **fields)), "unknown field _logit_scale")


@finding("newcomer B8", "The refusal of a width names no entry of splits", Verdict.MENDED)
def kept_whole(folder: Path) -> str:
    (folder / "own.py").write_text(OWN)
    ended = plan(folder, "own.py:wide", "--gpus", "4xCPU", *SMALL, "--tp", "4")
    return refuses(ended, 'Wide.splits = {"ff": Sharded("tp", "whole")} would keep it whole')


@finding(
    "parity vpp",
    "The search proposes no vpp for models without repeat, and none that does not divide the blocks",
    Verdict.MENDED,
)
def proposed_chunks(folder: Path) -> str:
    import numpy as np

    from megaloom.dsl import graph
    from megaloom.examples.llama3 import llama
    from megaloom.planner.contract.workload import Workload
    from megaloom.planner.hardware.cluster_names import cluster
    from megaloom.planner.search.candidates import Candidates
    from megaloom.planner.search.pricing import Pricer
    from tests.planner.search.test_brute_force import without_repeat

    blocks = llama("six", layers=6, heads=6, kv_heads=3, embed=96, ff=192, vocab=512)
    for model in (blocks, without_repeat(6)):
        pricer = Pricer(graph(model), cluster("2xH100"), Workload(seq=64, batch=8))
        candidates = Candidates(pricer, {"pp": 2})
        no_modules = np.zeros((len(candidates.base_layouts), 1), dtype=np.int64)
        layouts, _ = candidates.space.variants(candidates.base_layouts, no_modules)
        assert {1, 2, 3} <= set(layouts.vpp.tolist()), layouts.vpp
    return "vpp 2 and 3 are proposed for six blocks on two ranks, with and without repeat"
