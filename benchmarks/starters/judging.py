"""The loop that all starters have: each export is started, and what happened is printed."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Facts = dict[str, Any]
"""Settings that the launcher of an export passes on: its words, its number of processes, its environment."""


def judge(start: Callable[[Path, Facts], object]) -> None:
    """Start each export that the command line names, and print a line for it. The facts are in a file beside it."""
    for name in sys.argv[2:]:
        export = Path(name)
        facts = json.loads(export.with_suffix(".facts").read_text())
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(facts["processes"]))
        connections = facts["environment"].get("CUDA_DEVICE_MAX_CONNECTIONS")
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        if connections is not None:
            os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = connections
        try:
            start(export, facts)
            verdict, why = "started", ""
        except (Exception, SystemExit) as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split())
            verdict = "refused"
            why = f"{type(error).__name__}: {text[:300]} ({os.path.basename(where.filename)}:{where.lineno})"
        print(f"VERDICT\t{export.name}\t{verdict}\t{why}", flush=True)
