"""Read a cluster file, TOML or JSON: a known device, and the fields in which this cluster differs.

    base = "H100"         # the source of every figure that is not given
    count = 64            # devices; `--gpus 32xFILE` takes 32 of them
    per_node = 8
    nics = 4              # network cards of a node, if fewer than devices
    pod = 512             # devices below one set of switches
    oversubscription = 3  # of the links beyond a pod
    [inter]               # one network card; [device] and [intra] are the other tables
    bandwidth = 25e9

`read_cluster_file` returns its contents, or raises UserError that names the file and the field. `megaloom measure`
writes such a file, with its measurements beside the figures.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from attrs import evolve, fields, frozen, resolve_types

from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_file import parse_json, read_text
from megaloom.planner.contract.calibration import Calibration
from megaloom.planner.contract.devices import (
    Device,
    Link,
    Preset,
    a,
)
from megaloom.planner.contract.layout import MOST
from megaloom.planner.contract.structured import StructureError, structured
from megaloom.planner.contract.workload import Precision

from .presets import PRESETS

CLUSTER_FILE_VERSION = 1
_EXAMPLE = 'a cluster file looks like\n  base = "H100"\n  count = 64\n  [inter]\n  bandwidth = 25e9'
TABLE_FIELDS: Mapping[str, type] = {"device": Device, "intra": Link, "inter": Link}
COUNT_FIELDS = ("count", "per_node", "nics", "pod")
FIGURE_FIELDS = ("oversubscription", "failures", "storage")
REPORT_FIELDS = ("measured", "command", "date", "host", "software")
"""Fields of a measured profile that are not figures."""
# A device with a preset's name must be near its datasheet, within the clocks that it may be set to.
_LEAST_SHARE, _MOST_SHARE = 0.5, 1.1


@frozen(kw_only=True)
class ClusterFile:
    """The contents of a cluster file: devices and links, their count, and the other fields of a Cluster."""

    base: str
    preset: Preset
    count: int | None
    rest: dict[str, Any]


def read_cluster_file(path: str) -> ClusterFile:
    """Return the contents of a cluster file. Raises UserError if it cannot be read or a field is wrong."""
    try:
        text = read_text(path)
        raw = parse_json(text) if path.endswith(".json") else tomllib.loads(text)
    except OSError as error:
        _refuse(path, f"cannot be read: {error.strerror}", "give an existing file, or a known device, as in 8xH100")
    except (ValueError, RecursionError) as error:  # bad UTF-8 is one
        _refuse(path, f"is not {'JSON' if path.endswith('.json') else 'TOML'}: {error}", _EXAMPLE)
    if not isinstance(raw, dict):
        _refuse(path, "has no fields", _EXAMPLE)
    if "stages" in raw:
        _refuse(path, "is a plan, not a cluster", f"`megaloom train {path}` trains by it; {_EXAMPLE}")
    version = raw.pop("version", CLUSTER_FILE_VERSION)
    if version != CLUSTER_FILE_VERSION or isinstance(version, bool):
        _refuse(
            path,
            f"has version {version!r}; this megaloom reads version {CLUSTER_FILE_VERSION}",
            "measure again with `megaloom measure`",
        )
    _known(
        path,
        "field",
        raw,
        ("base", "name", *COUNT_FIELDS, *FIGURE_FIELDS, *TABLE_FIELDS, "calibration", *REPORT_FIELDS),
    )
    if raw.get("base") not in list(PRESETS):  # a list has no hash
        wrong = f"has the base {raw['base']!r}, which is not known" if "base" in raw else "has no base"
        _refuse(path, wrong, f'write base = "H100"; known: {", ".join(PRESETS)}')
    return _contents(path, raw, PRESETS[raw["base"]])


def _contents(path: str, raw: dict[str, Any], base: Preset) -> ClusterFile:
    counts = {name: _count(path, name, raw[name]) for name in COUNT_FIELDS if name in raw}
    parts = {name: _part(path, name, raw.get(name, {}), kind) for name, kind in TABLE_FIELDS.items()}
    domain, tray = counts.get("per_node", base.domain), counts.pop("per_node", base.tray)
    inter = evolve(base.inter, **parts["inter"])
    preset = Preset(
        device=_device(path, base.device, raw.get("name", base.device.name), parts["device"]),
        intra=evolve(base.intra, **parts["intra"]),
        inter=evolve(inter, bandwidth=inter.bandwidth * counts.pop("nics", domain) / domain),
        domain=domain,
        tray=tray,
    )
    rest: dict[str, Any] = {**counts, **{name: _number(path, name, raw[name]) for name in FIGURE_FIELDS if name in raw}}
    if "calibration" in raw:
        rest["calibration"] = _calibration(path, raw["calibration"])
    return ClusterFile(base=raw["base"], preset=preset, count=rest.pop("count", None), rest={**rest, "source": path})


def _calibration(path: str, table: object) -> Calibration:
    try:
        return structured({"memory_high": None, **table} if isinstance(table, dict) else table, Calibration)
    except StructureError as error:
        _refuse(path, f"has a wrong calibration: {error}", "make the file again with `megaloom calibrate`")


def _device(path: str, base: Device, name: object, given: dict[str, Any]) -> Device:
    """Return the base device with the given fields; refuse figures of another device under a preset's name."""
    name = _text(path, "name", name)
    device = evolve(base, name=name, **{**given, "flops": {**base.flops, **given.get("flops", {})}})
    datasheet = PRESETS[name].device if name in PRESETS and name != "CPU" else device
    pairs = [(f"flops.{p}", device.flops[p], due) for p, due in datasheet.flops.items() if p in device.flops]
    for what, value, due in (*pairs, ("bandwidth", device.bandwidth, datasheet.bandwidth)):
        if not _LEAST_SHARE * due <= value <= _MOST_SHARE * due:
            _refuse(
                path,
                f"has device.{what} = {value:g}, but that of {a(name)} is {due:g}",
                "give the share that is reached as flops_efficiency and bandwidth_efficiency, "
                "or set `name` if this is another device",
            )
    return device


def _part(path: str, name: str, table: object, kind: type) -> dict[str, Any]:
    """Return the fields of a device or link that the file gives."""
    if not isinstance(table, dict):
        _refuse(path, f"has {name} = {table!r:.40}", f"{name} is a table: write [{name}] and its fields below")
    own = fields(resolve_types(kind))  # whoever reads a plan resolves them too: a type is never compared as text
    due = {f.name: f.type for f in own if (kind, f.name) != (Device, "name")}  # which is the file's own name
    _known(path, f"field of {name}", table, due)
    out: dict[str, Any] = {}
    for field, value in table.items():
        where = f"{name}.{field}"
        if field == "name":
            out[field] = _text(path, where, value)
        elif field == "flops":
            if not isinstance(value, dict):
                _refuse(path, f"has {where} = {value!r:.40}", "give a peak for each precision: {bf16 = 1e15}")
            _known(path, f"precision of {where}", value, list(Precision))
            out[field] = {p: _number(path, f"{where}.{p}", x) for p, x in value.items()}
        else:
            figure = _number(path, where, value)
            out[field] = int(figure) if due[field] is int else figure
    return out


def _text(path: str, name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        _refuse(path, f"has {name} = {value!r:.40}", f"{name} must be a text")
    return value


def _count(path: str, name: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= MOST:
        _refuse(path, f"has {name} = {value!r:.40}", f"{name} must be a whole number from 1 to {MOST:,}")
    return value


def _number(path: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        _refuse(path, f"has {name} = {value!r:.40}", f"{name} must be a number")
    return float(value)


def _known(path: str, what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse the first name that is not known."""
    for name in given:
        if name not in (names := list(known)):
            near = difflib.get_close_matches(name, names, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            _refuse(path, f"has an unknown {what}, {name!r}{hint}", f"known: {', '.join(names)}")


def _refuse(path: str, what: str, works: str) -> NoReturn:
    raise UserError(f"{path} {what}\n{works}")
