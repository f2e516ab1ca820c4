"""Clusters by their names: `cluster("64xH100")` makes one from the presets, `cluster("64xours.toml")` from a file."""

from __future__ import annotations

import difflib
import re
from typing import Any

from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.devices import Cluster, Preset

from .presets import PRESETS

SAME = {"sxm", "sxm2", "sxm4", "sxm5", "sxm6", "hgx", "dgx", "nvl72"}  # words that say of a kind what it is anyway
USUAL = {"v100": "32gb", **dict.fromkeys(("a100", "a800", "h100", "h800"), "80gb"), "h200": "141gb"}
DEFAULT = "H100"  # the kind that a bare count means
FILE = re.compile(r"\s*(?:(-?\d+)\s*[x*\u00d7]\s*)?(\S.*\.(?:toml|json))\s*", re.DOTALL)


def is_row(text: str) -> bool:
    """Whether this names more than one cluster, as 8..64xH100 does."""
    return re.match(r"\s*\d+\s*\.\.", text) is not None


def cluster(text: str) -> Cluster:
    """The cluster that `64xH100` names: a count and a kind of device; the kind may be a cluster's file.

    `H100` alone is one of them, a file alone as many as it says, `64` alone that many H100; nodes are as the preset or
    the file has them, filled evenly.

    Raises UserError for a kind that is not known, for a wrong file, and for a count that fills no nodes.
    """
    if re.fullmatch(r"\s*-?\d+\s*", text):
        text = f"{text}x{DEFAULT}"
    if found := FILE.fullmatch(text):
        return _from_file(found[2], found[1])
    found = re.fullmatch(r"\s*(?:(-?\d+)\s*[x*\u00d7]\s*)?([a-z][\w-]*)\s*", text, re.I)
    if not found:
        raise UserError(
            f"{text!r} is not a number of devices of a kind\n"
            f"say it as 8xH100, or as 8xours.toml if a file says what they are; known: {', '.join(PRESETS)}"
        )
    return _made(int(found[1] or 1), _find(found[2]), {})


def _from_file(path: str, count: str | None) -> Cluster:
    from .cluster_file import read

    try:
        said = read(path)
        return _made(int(count) if count else said.count or 1, said.preset, said.rest)
    except UserError as error:
        raise error if path in str(error) else UserError(f"{path}: {error}") from None


def _made(count: int, preset: Preset, rest: dict[str, Any]) -> Cluster:
    made = Cluster(device=preset.device, count=1, per_node=1, intra=preset.intra, inter=preset.inter, **rest)
    if count < 1:
        raise UserError(f"{count}x{made.kind}: {count} devices can train nothing\nask for at least 1x{made.kind}")
    return evolve(made, count=count, per_node=_per_node(count, preset, made.kind))


def known(name: str) -> Preset | None:
    """The kind that is called so, whatever the order of the words: A100-SXM4-40GB is an A100-40GB."""
    return next((PRESETS[kind] for kind in PRESETS if _words(kind) == _words(name)), None)


def _find(name: str) -> Preset:
    if found := known(name):
        return found
    near = difflib.get_close_matches(name.lower(), kinds := {kind.lower(): kind for kind in PRESETS}, 1)
    hint = f"; did you mean {kinds[near[0]]}?" if near else ""
    raise UserError(f"unknown device {name!r}{hint}\nknown: {', '.join(PRESETS)}")


def _words(name: str) -> set[str]:
    said = set(name.lower().split("-")) - SAME
    return said - {USUAL.get(word, "") for word in said}


def _per_node(count: int, preset: Preset, kind: str) -> int:
    """The most devices a node that fill every node evenly, in whole trays."""
    if count <= preset.tray:
        return count
    if count % preset.tray:
        below = count // preset.tray * preset.tray
        raise UserError(
            f"{count}x{kind}: they come {preset.tray} to a node, and {count} do not fill nodes evenly\n"
            f"{below}x{kind} or {below + preset.tray}x{kind} would"
        )
    trays, most = count // preset.tray, preset.domain // preset.tray
    return preset.tray * max(n for n in range(1, min(trays, most) + 1) if trays % n == 0)
