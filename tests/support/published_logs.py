"""Logs of published runs, in the form of Megatron-LM's: the arguments that describe a run, its step, and its memory.

`python -m tests.support.published_logs` writes tests/data/logs: Llama 3 70B cut to 12 layers on 8 B200, measured by the
authors of SimuMax (github.com/MooreThreads/SimuMax, docs/b200/b200_release_v1.2_summary.json) and recorded in
benchmarks/accuracy/data/published_runs.jsonl. Only the mean of the steps is published, so each log has one interval.
"""

from __future__ import annotations

import json
from typing import Any

from tests.support.paths import ROOT, TESTS

DATA = ROOT / "benchmarks" / "accuracy" / "data" / "published_runs.jsonl"
LOGS = TESTS / "data" / "logs"
IDS = tuple(f"simumax-{number:03}" for number in (1, 2, 3, 4, 17, 18, 19, 20))
WIDTH = 48
STEPS = 20


def arguments(record: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a record's run by destination, as Megatron-LM lists them."""
    layout, decoder = record["layout"], record["decoder"]
    return {
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "bf16": True,
        "cross_entropy_fusion_impl": "te",
        "cross_entropy_loss_fusion": True,
        "ffn_hidden_size": decoder["ffn"],
        "global_batch_size": record["global_batch"],
        "group_query_attention": True,
        "hidden_dropout": 0.0,
        "hidden_size": decoder["hidden"],
        "max_position_embeddings": decoder["max_positions"],
        "micro_batch_size": layout.get("micro_batch", 1),
        "normalization": "RMSNorm",
        "num_attention_heads": decoder["heads"],
        "num_layers": decoder["layers"],
        "num_query_groups": decoder["kv_heads"],
        "pipeline_model_parallel_size": layout.get("pp", 1),
        "position_embedding_type": "rope",
        "seq_length": record["sequence_length"],
        "sequence_parallel": layout.get("sequence_parallel", False),
        "swiglu": True,
        "tensor_model_parallel_size": layout.get("tp", 1),
        "untie_embeddings_and_output_weights": True,
        "use_distributed_optimizer": layout.get("shard") == "optimizer",
        "vocab_size": decoder["vocab"],
        "world_size": record["devices"],
    }


def log_text(record: dict[str, Any]) -> str:
    """Return the log of a record's run."""
    batch, measured = record["global_batch"], record["measured"]
    most = f"{1024 * measured['memory_gib']:.1f}"
    return "\n".join(
        (
            f"{record['id']}: {record['reference']}; written by tests/support/published_logs.py",
            "------------------------ arguments ------------------------",
            *(f"  {name} {'.' * (WIDTH - len(name))} {value}" for name, value in arguments(record).items()),
            "-------------------- end of arguments ---------------------",
            f" iteration {STEPS:8d}/{STEPS:8d} | consumed samples: {STEPS * batch:12d} | "
            f"elapsed time per iteration (ms): {1e3 * measured['step_seconds']:.1f} | global batch size: {batch:5d} |",
            f"[Rank 0] (after {STEPS} iterations) memory (MB) | max allocated: {most} |",
            "",
        )
    )


def logs() -> dict[str, str]:
    """Return the texts of the logs by the names of their files."""
    rows = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
    return {f"{row['id']}.log": log_text(row) for row in rows if row["id"] in IDS}


def main() -> None:
    """Write the logs."""
    LOGS.mkdir(exist_ok=True)
    for name, text in logs().items():
        (LOGS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
