"""Clusters by their names: `cluster("64xH100")` makes one from the presets."""

from __future__ import annotations

import difflib
import re

from megaloom.dsl.errors import UserError

from .device import Cluster, Device, GiB, Link, Preset
from .presets import PRESETS

__all__ = ["PRESETS", "Cluster", "Device", "GiB", "Link", "Preset", "cluster"]

ALIASES = {"A100-80GB": "A100"}
DEFAULT = "H100"  # the kind that a bare count means


def cluster(text: str) -> Cluster:
    """The cluster that `64xH100` names: a count and a kind of device.

    `H100` alone is one of them, `64` alone that many H100; nodes are as the preset has them, filled evenly.

    Raises UserError for a kind that is not known and for a count that fills no nodes.
    """
    if re.fullmatch(r"\s*-?\d+\s*", text):
        text = f"{text}x{DEFAULT}"
    found = re.fullmatch(r"\s*(?:(-?\d+)\s*[x*\u00d7]\s*)?([a-z][\w-]*)\s*", text, re.I)
    if not found:
        raise UserError(f"{text!r} is not a number of devices of a kind\nsay it as 8xH100; known: {', '.join(PRESETS)}")
    count, preset = int(found[1] or 1), _find(found[2])
    if count < 1:
        raise UserError(f"{text!r}: {count} devices can train nothing\nask for at least 1x{preset.device.name}")
    return Cluster(
        device=preset.device,
        count=count,
        per_node=_per_node(count, preset),
        intra=preset.intra,
        inter=preset.inter,
    )


def _find(name: str) -> Preset:
    kinds = {kind.lower(): kind for kind in PRESETS} | {alias.lower(): kind for alias, kind in ALIASES.items()}
    if name.lower() not in kinds:
        near = difflib.get_close_matches(name.lower(), kinds, 1)
        hint = f"; did you mean {kinds[near[0]]}?" if near else ""
        raise UserError(f"unknown device {name!r}{hint}\nknown: {', '.join(PRESETS)}")
    return PRESETS[kinds[name.lower()]]


def _per_node(count: int, preset: Preset) -> int:
    """The most devices a node that fill every node evenly, in whole trays."""
    if count <= preset.tray:
        return count
    if count % preset.tray:
        below = count // preset.tray * preset.tray
        raise UserError(
            f"{count}x{preset.device.name}: they come {preset.tray} to a node, and {count} do not fill nodes evenly\n"
            f"{below}x{preset.device.name} or {below + preset.tray}x{preset.device.name} would"
        )
    trays, most = count // preset.tray, preset.domain // preset.tray
    return preset.tray * max(n for n in range(1, min(trays, most) + 1) if trays % n == 0)
