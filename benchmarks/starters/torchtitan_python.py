"""Starts exports to torchtitan 0.3.0: its ConfigManager, the mesh of its axes, its Trainer's checks, and its model."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), sys.argv[1]]
from empty_modules import hopper, install_empty_modules  # noqa: E402
from judging import Facts, judge  # noqa: E402

install_empty_modules()
hopper()
import torch  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402


def start(export: Path, facts: Facts) -> None:
    """Read a module, build the mesh for the export's processes, and build the model of its size without memory."""
    sys.path.insert(0, str(export.parent))
    job = ConfigManager().parse_args(["--module", export.stem, "--config", "planned"])
    x = job.parallelism
    mesh = ParallelDims(
        dp_shard=x.data_parallel_shard_degree,
        dp_replicate=x.data_parallel_replicate_degree,
        cp=x.context_parallel_degree,
        tp=x.tensor_parallel_degree,
        pp=x.pipeline_parallel_degree,
        ep=x.expert_parallel_degree,
        world_size=facts["processes"],
        spmd_backend=x.spmd_backend,
    )
    ranks = mesh.dp_replicate * mesh.dp_shard
    assert job.training.global_batch_size % (job.training.local_batch_size * ranks) == 0
    job.model_spec.model.update_from_config(config=job)
    with torch.device("meta"):
        model = job.model_spec.model.build()
    built = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    assert built == facts["parameters"], f"{built} parameters, in the plan {facts['parameters']}"


judge(start)
