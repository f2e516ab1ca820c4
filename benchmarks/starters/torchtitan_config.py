"""Starts exports to torchtitan 0.2.2: its ConfigManager, the mesh of its axes, and the arguments of its model."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), sys.argv[1]]
from empty_modules import hopper, install_empty_modules  # noqa: E402
from judging import Facts, judge  # noqa: E402

install_empty_modules()
hopper()
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.protocols.train_spec import get_train_spec  # noqa: E402


def start(export: Path, facts: Facts) -> None:
    """Read a TOML file, build the mesh for the export's processes, and update the flavor's arguments by the file."""
    job = ConfigManager().parse_args(["--job.config_file", str(export)])
    x = job.parallelism
    ParallelDims(
        dp_shard=x.data_parallel_shard_degree,
        dp_replicate=x.data_parallel_replicate_degree,
        cp=x.context_parallel_degree,
        tp=x.tensor_parallel_degree,
        pp=x.pipeline_parallel_degree,
        ep=x.expert_parallel_degree,
        etp=x.expert_tensor_parallel_degree,
        world_size=facts["processes"],
    )
    get_train_spec(job.model.name).model_args[job.model.flavor].update_from_config(job)


judge(start)
