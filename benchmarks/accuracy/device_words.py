"""Device and precision of a row of the older schema, for which published tables have many spellings."""

from __future__ import annotations

import re

from megaloom.planner.contract.devices import GiB
from megaloom.planner.contract.workload import Precision
from megaloom.planner.hardware.cluster_names import known

from .row_values import Row, row_number, row_text
from .training_run import UnfitError

# Parts of a published GPU name beside its kind: vendor, number, memory type, "(inferred)".
_OTHER_WORDS = re.compile(r"\(.*|\b\d+\s*[x*] ?|\b(nvidia|tensor|core|gpus?|hbm\d?e?)\b")
_GIGABYTES = re.compile(r"\b(\d+)\s*gi?b\b")
PUBLISHED_NAMES = {"H100-96GB-HBM2e-500W": "H100-HBM2e-500W"}  # of published_devices
MEMORY_TOLERANCE = 0.15  # published sizes are rounded: 278 GB for 288, 80 GB for 80 GiB
# Fewer than 16 bits may stand anywhere, as in "bf16 gradients, MXFP8"; of wider types the first one counts.
_NARROW = (
    (re.compile(r"nvfp4|\bfp4"), Precision.NVFP4),
    (re.compile(r"mxfp8|fp8[-_ ]?mx"), Precision.MXFP8),
    (re.compile(r"fp8|float8"), Precision.FP8),
)
_WIDE = re.compile(r"(?P<bf16>bf16|bfloat16)|(?P<fp16>fp16|float16)|(?P<fp32>fp32|float32)")


def row_device(row: Row) -> str:
    """Return our preset of a row's GPU, such as H100 for "8x H100-SXM5-80GB". Raises UnfitError for other memory."""
    if row_text(row, "gpu") in PUBLISHED_NAMES:
        return PUBLISHED_NAMES[row_text(row, "gpu")]
    words = row_text(row, "gpu").lower()
    sizes = [int(n) for n in _GIGABYTES.findall(words)]
    kind = "-".join(re.findall(r"[a-z0-9]+", _OTHER_WORDS.sub(" ", _GIGABYTES.sub(" ", words))))
    gigabytes = sizes[0] if sizes else row_number(row, "gpu_mem_gb")
    preset = (known(f"{kind}-{gigabytes:.0f}gb") if gigabytes else None) or known(kind)
    if preset is None:
        return kind.upper()
    device = preset.device
    if gigabytes and abs(gigabytes * 1e9 / device.nbytes - 1) > MEMORY_TOLERANCE:
        raise UnfitError(f"a {device.name} of {gigabytes:.0f} GB: our preset has {device.nbytes / GiB:.0f} GiB")
    return device.name


def row_precision(row: Row) -> Precision:
    """Return the precision of a row's matrix products. Raises UnfitError for an unknown one."""
    words = row_text(row, "precision_class") or row_text(row, "precision")
    for pattern, precision in _NARROW:
        if pattern.search(words.lower()):
            return precision
    if (wide := _WIDE.search(words.lower())) and wide.lastgroup:
        return Precision(wide.lastgroup)
    raise UnfitError(f"unknown precision {words!r}" if words else "no precision")
