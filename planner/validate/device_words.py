"""Device and precision of a row of the older schema, for which published tables have many spellings."""

from __future__ import annotations

import re

from megaloom.planner.contract.devices import GiB
from megaloom.planner.contract.workload import Precision
from megaloom.planner.hardware.cluster_names import known

from .row_values import Row, row_number, row_text
from .run import UnfitError

# What a published GPU's name has beside its kind: who made it, how many, the memory's make, "(inferred)".
BESIDE = re.compile(r"\(.*|\b\d+\s*[x*] ?|\b(nvidia|tensor|core|gpus?|hbm\d?e?)\b")
MEMORY = re.compile(r"\b(\d+)\s*gi?b\b")
NEAR = 0.15  # by how much memory may differ from ours: 278 GB are said of 288, and 80 of 80 GiB
# What products are narrow in stands anywhere, as in "bf16 gradients, MXFP8"; else what is said first is meant.
NARROW = (
    (re.compile(r"nvfp4|\bfp4"), Precision.NVFP4),
    (re.compile(r"mxfp8|fp8[-_ ]?mx"), Precision.MXFP8),
    (re.compile(r"fp8|float8"), Precision.FP8),
)
WIDE = re.compile(r"(?P<bf16>bf16|bfloat16)|(?P<fp16>fp16|float16)|(?P<fp32>fp32|float32)")


def row_device(row: Row) -> str:
    """Our name of a row's GPU: 8x H100-SXM5-80GB is an H100. Raises UnfitError for memory that ours does not have."""
    said = row_text(row, "gpu").lower()
    sizes = [int(n) for n in MEMORY.findall(said)]
    kind = "-".join(re.findall(r"[a-z0-9]+", BESIDE.sub(" ", MEMORY.sub(" ", said))))
    gigabytes = sizes[0] if sizes else row_number(row, "gpu_mem_gb")
    found = (known(f"{kind}-{gigabytes:.0f}gb") if gigabytes else None) or known(kind)
    if found is None:
        return kind.upper()
    ours = found.device
    if gigabytes and abs(gigabytes * 1e9 / ours.nbytes - 1) > NEAR:
        raise UnfitError(f"a {ours.name} of {gigabytes:.0f} GB: ours has {ours.nbytes / GiB:.0f} GiB")
    return ours.name


def row_precision(row: Row) -> Precision:
    """What a row's products are computed in. Raises UnfitError for what is not known."""
    said = row_text(row, "precision_class") or row_text(row, "precision")
    for words, found in NARROW:
        if words.search(said.lower()):
            return found
    if (wide := WIDE.search(said.lower())) and wide.lastgroup:
        return Precision(wide.lastgroup)
    raise UnfitError(f"a precision of {said!r}" if said else "no precision")
