"""The fields of a plan that a target's file does not say, each with the reason: one table.

An export that is read again gives the same plan but for these fields; a test holds every target to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .target import Target

Reasons = Mapping[str, str]
"""Fields of a layout or a workload, or `model`, `stages` and `devices`, with the reason."""
_LAUNCHED = "torchrun's options say it, not the script"
NOT_EXPRESSED: Mapping[Target, Reasons] = MappingProxyType(
    {
        Target.MEGATRON_LM: {},
        Target.SLURM: {},
        Target.MEGATRON_BRIDGE: {"devices": _LAUNCHED},
    }
)
