"""A cluster as a small file, TOML or JSON: a known kind of device, and what is different here.

    base = "H100"         # where every figure comes from that is not given
    count = 64            # devices; `--gpus 64xFILE` says it as well
    per_node = 8
    nics = 4              # network cards of a node, if they are not as many as devices
    pod = 512             # devices below one set of switches, and by how much the links beyond it are too few
    oversubscription = 3
    [inter]               # one network card; [device] and [intra] are the other parts
    bandwidth = 25e9

Protocol: `read` gives what a file says. What `megaloom measure` writes is such a file, with what was measured beside
the figures. A wrong one is a UserError that names the file and the field.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from attrs import evolve, fields, frozen

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.devices import (
    Device,
    Link,
    Preset,
    a,
)
from megaloom.planner.contract.workload import Precision

from .presets import PRESETS

VERSION = 1
EXAMPLE = 'a cluster is a file such as\n  base = "H100"\n  count = 64\n  [inter]\n  bandwidth = 25e9'
PARTS: Mapping[str, type] = {"device": Device, "intra": Link, "inter": Link}
COUNTS = ("count", "per_node", "nics", "pod")
FIGURES = ("oversubscription", "failures", "storage")
REPORT = ("measured", "command", "date", "host", "software")
"""What a measured profile says beside its figures."""
# What is told of a device by a known name is near its datasheet: within the clocks that it may be set to.
LEAST, MOST = 0.5, 1.1


@frozen(kw_only=True)
class Said:
    """What a file says of a cluster: its devices and links, how many, and the other fields of a Cluster."""

    preset: Preset
    count: int | None
    rest: dict[str, Any]


def read(path: str) -> Said:
    """What this file says. Raises UserError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        raw = json.loads(text) if path.endswith(".json") else tomllib.loads(text)
    except OSError as error:
        _refuse(path, f"cannot be read: {error.strerror}", "give a file that is there, or a kind, as in 8xH100")
    except (ValueError, RecursionError) as error:  # bad UTF-8 is one
        _refuse(path, f"is no {'JSON' if path.endswith('.json') else 'TOML'}: {error}", EXAMPLE)
    if not isinstance(raw, dict):
        _refuse(path, "holds no fields", EXAMPLE)
    if "stages" in raw:
        _refuse(path, "is a plan, not a cluster", f"`megaloom train {path}` trains by it; {EXAMPLE}")
    version = raw.pop("version", VERSION)
    if version != VERSION or isinstance(version, bool):
        _refuse(path, f"is of version {version!r}; this megaloom reads version {VERSION}", "measure again")
    _known(path, "field", raw, ("base", "name", *COUNTS, *FIGURES, *PARTS, *REPORT))
    if raw.get("base") not in list(PRESETS):  # a list has no hash
        said = f"has the base {raw['base']!r}, which is not known" if "base" in raw else "has no base"
        _refuse(path, said, f'write base = "H100"; known: {", ".join(PRESETS)}')
    return _said(path, raw, PRESETS[raw["base"]])


def _said(path: str, raw: dict[str, Any], base: Preset) -> Said:
    counts = {name: _count(path, name, raw[name]) for name in COUNTS if name in raw}
    parts = {name: _part(path, name, raw.get(name, {}), kind) for name, kind in PARTS.items()}
    domain, tray = counts.get("per_node", base.domain), counts.pop("per_node", base.tray)
    inter = evolve(base.inter, **parts["inter"])
    preset = Preset(
        device=_device(path, base.device, raw.get("name", base.device.name), parts["device"]),
        intra=evolve(base.intra, **parts["intra"]),
        inter=evolve(inter, bandwidth=inter.bandwidth * counts.pop("nics", domain) / domain),
        domain=domain,
        tray=tray,
    )
    figures = {name: _number(path, name, raw[name]) for name in FIGURES if name in raw}
    return Said(preset=preset, count=counts.pop("count", None), rest={**counts, **figures, "source": path})


def _device(path: str, base: Device, name: object, given: dict[str, Any]) -> Device:
    """The base with what is given, which may not be another device under a known name."""
    name = _text(path, "name", name)
    made = evolve(base, name=name, **{**given, "flops": {**base.flops, **given.get("flops", {})}})
    sheet = PRESETS[name].device if name in PRESETS and name != "CPU" else made
    pairs = [(f"flops.{p}", made.flops[p], due) for p, due in sheet.flops.items() if p in made.flops]
    for what, value, due in (*pairs, ("bandwidth", made.bandwidth, sheet.bandwidth)):
        if not LEAST * due <= value <= MOST * due:
            _refuse(
                path,
                f"has device.{what} = {value:g}, but that of {a(name)} is {due:g}",
                "what is reached of a peak is flops_efficiency and bandwidth_efficiency; "
                "another device needs another name",
            )
    return made


def _part(path: str, name: str, table: object, kind: type) -> dict[str, Any]:
    """The fields that a file gives of a device or a link."""
    if not isinstance(table, dict):
        _refuse(path, f"has {name} = {table!r:.40}", f"{name} is a table: write [{name}], and its fields below")
    due = {f.name: f.type for f in fields(kind) if (kind, f.name) != (Device, "name")}  # which is the file's own name
    _known(path, f"field of {name}", table, due)
    out: dict[str, Any] = {}
    for field, value in table.items():
        where = f"{name}.{field}"
        if field == "name":
            out[field] = _text(path, where, value)
        elif field == "flops":
            if not isinstance(value, dict):
                _refuse(path, f"has {where} = {value!r:.40}", "a peak for each precision is due: {bf16 = 1e15}")
            _known(path, f"precision of {where}", value, list(Precision))
            out[field] = {p: _number(path, f"{where}.{p}", x) for p, x in value.items()}
        else:
            figure = _number(path, where, value)
            out[field] = int(figure) if due[field] == "int" else figure
    return out


def _text(path: str, name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        _refuse(path, f"has {name} = {value!r:.40}", f"{name} is a text")
    return value


def _count(path: str, name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        _refuse(path, f"has {name} = {value!r:.40}", f"{name} is a whole number, at least 1")
    return value


def _number(path: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        _refuse(path, f"has {name} = {value!r:.40}", f"{name} is a number")
    return float(value)


def _known(path: str, what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Nothing, if these names are known."""
    for name in given:
        if name not in (names := list(known)):
            near = difflib.get_close_matches(name, names, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            _refuse(path, f"has an unknown {what}, {name!r}{hint}", f"known: {', '.join(names)}")


def _refuse(path: str, what: str, works: str) -> NoReturn:
    raise UserError(f"{path} {what}\n{works}")
