"""Starts exports to Megatron-Bridge: the script's configuration is built and validated, as `pretrain` does first.

FOLDER has Megatron-Bridge's `src` and, in `megatron-lm`, its 3rdparty/Megatron-LM where that is not installed.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

FOLDER = Path(sys.argv[1])
sys.path[:0] = [str(Path(__file__).parent), *map(str, filter(Path.exists, (FOLDER / "megatron-lm", FOLDER / "src")))]
from empty_modules import hopper, install_empty_modules  # noqa: E402
from judging import Facts, judge  # noqa: E402

install_empty_modules()
hopper()
from megatron.bridge.training.config import runtime_config_update  # noqa: E402


def start(export: Path, _: Facts) -> None:
    """Build the configuration of a script without training, and apply and validate it."""
    runtime_config_update(runpy.run_path(str(export), run_name="export")["config"]())


judge(start)
