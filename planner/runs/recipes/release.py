"""The release of a framework: as the comments of a file state it, or the package whose recipes were read."""

from __future__ import annotations

import ast
import re
from itertools import takewhile

from .modules import ModuleFiles

PARTS = ("MAJOR", "MINOR", "PATCH")
PACKAGE = "megatron.bridge.package_info"
_NUMBER = r"\d+(?:\.\d+)+"


def release_in_comment(text: str, framework: str) -> str:
    """Return the release that the comments at a file's beginning state: `For torchtitan 0.3.0`; empty if none do."""
    lines = takewhile(lambda line: line.startswith("#") or not line.strip(), text.splitlines())
    pattern = re.compile(rf"\bFor {re.escape(framework)} ({_NUMBER}(?: to {_NUMBER})?)")
    return next((found[1] for line in lines if (found := pattern.search(line))), "")


def bridge_release(files: ModuleFiles) -> str:
    """Return the release of Megatron-Bridge beside the files of its recipes; empty if it is not there."""
    module = files.module(PACKAGE)
    parts = [module.constants.get(name) for name in PARTS] if module is not None else []
    numbers = [str(one.value) for one in parts if isinstance(one, ast.Constant) and type(one.value) is int]
    return ".".join(numbers) if len(numbers) == len(PARTS) else ""
