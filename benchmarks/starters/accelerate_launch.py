"""Starts exports to Accelerate: `accelerate launch` checks the file, and the plugin is built from what it passes on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), *([sys.argv[1]] if sys.argv[1] != "installed" else [])]
from empty_modules import install_empty_modules  # noqa: E402
from judging import Facts, judge  # noqa: E402

install_empty_modules()
from accelerate.commands import launch  # noqa: E402
from accelerate.utils import FullyShardedDataParallelPlugin, MegatronLMPlugin  # noqa: E402
from accelerate.utils.launch import prepare_multi_gpu_env  # noqa: E402

launch.is_bf16_available = lambda ignore_tpu=False: True


def start(export: Path, _: Facts) -> None:
    """Check a file and build its plugin."""
    words = ["--config_file", str(export), "train.py"]
    arguments, _, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
    os.environ.update(prepare_multi_gpu_env(arguments))
    if arguments.use_megatron_lm:
        MegatronLMPlugin()
    elif arguments.use_fsdp:
        FullyShardedDataParallelPlugin()
    else:
        raise ValueError("neither FSDP nor Megatron-LM")


judge(start)
