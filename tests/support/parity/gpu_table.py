"""Families on GPUs: what the kernels that only GPUs have compute, against one GPU and against the oracle on CPU.

python -m tests.support.parity.gpu_table             # all families; on a machine with two GPUs
python -m tests.support.parity.gpu_table gpt-oss t5  # some

On a machine with one GPU only the layout "recompute" runs: the layers compute their outputs twice, and the gradients
must be those without it and those of the oracle. The others are skipped.

The families have heads of at least 16 channels, so that FlexAttention computes sinks, windows, soft caps, ALiBi,
relative biases and the masks of documents, and compiled kernels compute scans and convolutions.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from megaloom.dsl import Model, MoE, graph
from megaloom.planner.contract.choices import Recompute, Shard
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.runtime.megatron import device
from tests.support.models import gpu as gpu_models
from tests.support.models.gpu import SEQ
from tests.support.parity.drawn import is_legal, priced
from tests.support.parity.rank_pool import Case, Result, explanation, run_cases

LAYOUTS = {
    "recompute": Layout(recompute=Recompute.FULL),
    "TP2 SP": Layout(tp=2, sequence_parallel=True, vocab_multiple=8),
    "PP2": Layout(pp=2),
    "CP2": Layout(cp=2),
    "EP2 or DP2": Layout(dp=2, ep=2),
}
DP2 = Layout(dp=2, shard=Shard.OPTIMIZER)


MODELS: dict[str, Callable[[], Model]] = {
    "gpt-oss": gpu_models.gpt_oss_wide,
    "gemma2": gpu_models.gemma2_wide,
    "bloom": gpu_models.bloom_wide,
    "t5": gpu_models.t5_wide,
    "bart": gpu_models.bart_wide,
    "packed-llama": gpu_models.packed_llama,
    "qwen3-moe": gpu_models.qwen3_moe_wide,
    "mamba2": gpu_models.mamba2_wide,
    "qwen3-next": gpu_models.qwen3_next_wide,
    "bert": gpu_models.bert_wide,
    "llava": gpu_models.llava_wide,
}


def cases_of(family: str, precision: Precision, gpu: str) -> Iterator[Case]:
    """Yield the legal layouts of a family."""
    make = MODELS[family]
    model, ref = make(), f"{Path(gpu_models.__file__).resolve()}:{make.__name__}"
    g, work = graph(model), Workload(seq=SEQ, batch=4, precision=precision)
    sparse = any(isinstance(n.op, MoE) for n in g.nodes)
    for name, layout in LAYOUTS.items():
        chosen = DP2 if name == "EP2 or DP2" and not sparse else layout
        if is_legal(chosen, g, work):
            yield Case(f"{family}, {name}", ref, priced(model, chosen, work, device=gpu))


def lines(results: Iterable[Result]) -> Iterator[str]:
    """Yield one line for each case: gradients / losses / their difference from the oracle."""
    for r in results:
        status = "ok" if r.agrees else "DIFFERS"
        yield f"{r.name:<28} {status:<8} {explanation(r)}  ({r.seconds:.0f} s)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(MODELS))
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--precision", type=Precision, default=Precision.FP32)
    options = parser.parse_args()
    count, _, gpu = device.local_cluster().partition("x")
    ranks = min(2, int(count))
    agree = True
    for family in options.families:
        asked = [c for c in cases_of(family, options.precision, gpu) if c.name.split(", ")[1] in options.layouts]
        cases = [c for c in asked if c.plan.layout.world <= ranks]
        results = run_cases(cases, ranks, timeout=300)
        skipped = (f"{c.name:<28} skipped: it needs {c.plan.layout.world} GPUs" for c in asked if c not in cases)
        print("\n".join((*lines(results), *skipped)), flush=True)
        agree &= all(r.agrees for r in results)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
