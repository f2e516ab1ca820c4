"""Read the name of a cluster: `cluster("64xH100")` takes a preset, `cluster("64xours.toml")` a cluster file."""

from __future__ import annotations

import difflib
import re
from typing import Any

from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.devices import Cluster, Preset

from .presets import PRESETS

_IGNORED_WORDS = {"sxm", "sxm2", "sxm4", "sxm5", "sxm6", "hgx", "dgx", "nvl72"}  # true of the preset anyway
_DEFAULT_MEMORY = {"v100": "32gb", **dict.fromkeys(("a100", "a800", "h100", "h800"), "80gb"), "h200": "141gb"}
DEFAULT_DEVICE = "H100"  # of a bare count
_FILE_NAME = re.compile(r"\s*(?:(-?\d+)\s*[x*\u00d7]\s*)?(\S.*\.(?:toml|json))\s*", re.DOTALL)


def is_range(text: str) -> bool:
    """Return whether the text names a range of clusters, as 8..64xH100 does."""
    return re.match(r"\s*\d+\s*\.\.", text) is not None


def cluster(text: str) -> Cluster:
    """Return the cluster that `64xH100` names: a count and a kind of device, or a count and a cluster file.

    `H100` is one device, `64` is 64xH100, and a file without a count has the count that it states. Nodes have the size
    of the preset or file, and all nodes are equal.

    Raises UserError for an unknown device, a wrong file, and a count that is not a whole number of nodes.
    """
    if re.fullmatch(r"\s*-?\d+\s*", text):
        text = f"{text}x{DEFAULT_DEVICE}"
    if match := _FILE_NAME.fullmatch(text):
        return _from_file(match[2], match[1])
    match = re.fullmatch(r"\s*(?:(-?\d+)\s*[x*\u00d7]\s*)?([a-z][\w-]*)\s*", text, re.I)
    if not match:
        raise UserError(
            f"{text!r} is not a number and kind of devices\n"
            f"write 8xH100, or 8xours.toml for a cluster file; known devices: {', '.join(PRESETS)}"
        )
    return _cluster(int(match[1] or 1), _find(match[2]), {})


def _from_file(path: str, count: str | None) -> Cluster:
    from .cluster_file import read_cluster_file

    try:
        described = read_cluster_file(path)
        return _cluster(int(count) if count else described.count or 1, described.preset, described.rest)
    except UserError as error:
        raise error if path in str(error) else UserError(f"{path}: {error}") from None


def _cluster(count: int, preset: Preset, rest: dict[str, Any]) -> Cluster:
    unchecked = Cluster(device=preset.device, count=1, per_node=1, intra=preset.intra, inter=preset.inter, **rest)
    if count < 1:
        raise UserError(f"{count}x{unchecked.kind} has no device\ngive at least 1x{unchecked.kind}")
    return evolve(unchecked, count=count, per_node=_per_node(count, preset, unchecked.kind))


def known(name: str) -> Preset | None:
    """Return the preset of this name in any usual spelling: A100-SXM4-40GB is A100-40GB. None if unknown."""
    return next((PRESETS[kind] for kind in PRESETS if _words(kind) == _words(name)), None)


def _find(name: str) -> Preset:
    if preset := known(name):
        return preset
    near = difflib.get_close_matches(name.lower(), kinds := {kind.lower(): kind for kind in PRESETS}, 1)
    hint = f"; did you mean {kinds[near[0]]}?" if near else ""
    works = f"write a number and a device, as in 8xH100; known devices: {', '.join(PRESETS)}"
    raise UserError(f"unknown device {name!r}{hint}\n{works}")


def _words(name: str) -> set[str]:
    words = set(name.lower().split("-")) - _IGNORED_WORDS
    return words - {_DEFAULT_MEMORY.get(word, "") for word in words}


def _per_node(count: int, preset: Preset, kind: str) -> int:
    """Return the largest node size, in whole trays, that divides the count."""
    if count <= preset.tray:
        return count
    if count % preset.tray:
        below = count // preset.tray * preset.tray
        divisor = max(n for n in range(1, 2 * preset.tray + 1) if count % n == 0)
        raise UserError(
            f"{count}x{kind} is not a whole number of {preset.tray}-GPU nodes\n"
            f"use {below} or {below + preset.tray}, or describe your nodes in a cluster file (`per_node = {divisor}`)"
        )
    trays, most = count // preset.tray, preset.domain // preset.tray
    return preset.tray * max(n for n in range(1, min(trays, most) + 1) if trays % n == 0)
