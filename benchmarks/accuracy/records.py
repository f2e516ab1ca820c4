"""Records of published training runs: the schema of the shipped data, as JSON lines.

A record says what was run, on what, with which framework profile, and what was measured. Nothing here depends on what
was measured. `read_records` and `record_line` are inverse; `run_of_record` makes the value that is predicted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import StrEnum
from functools import cache, partial
from typing import Any

from attrs import evolve, field, frozen
from cattrs import Converter, transform_error

from megaloom.dsl.files.json_file import parse_json
from megaloom.dsl.graph import Model
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import FIELDS, Layout
from megaloom.planner.contract.plan_json import layout_to_json
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.planner.cost.profiles.groups import FrameworkProfile, compose
from megaloom.planner.hardware.cluster_names import cluster

from .features import FEATURES
from .frameworks import PUBLISHED
from .models.catalog_models import named_example
from .models.decoder import Decoder
from .models.hybrid import Hybrid
from .published_devices import PUBLISHED_DEVICES
from .training_run import TrainingRun, UnfitError


class MemoryKind(StrEnum):
    """The counter from which a measured memory was read."""

    ALLOCATED = "allocated"  # torch.cuda.max_memory_allocated
    RESERVED = "reserved"  # torch.cuda.max_memory_reserved
    DEVICE = "device"  # nvidia-smi


@frozen(kw_only=True)
class Network:
    """The network between nodes, where it is not the usual one of the device."""

    name: str
    gigabytes_per_second: float  # of one device
    efficiency: float  # share of that which NCCL reaches


@frozen(kw_only=True)
class Measurement:
    """Measured step time and memory of a run."""

    step_seconds: float | None = None
    memory_gib: float | None = None
    memory_kind: MemoryKind | None = None
    last_rank: bool = False  # memory is that of the last pipeline rank, not of the fullest one
    out_of_memory: bool = False


@frozen(kw_only=True)
class RunRecord:
    """A published run in the schema of the shipped data. A model is a decoder, a hybrid or an example of megaloom."""

    id: str
    source: str  # collection that the run belongs to
    reference: str  # where it was published
    model: str  # name in the source
    decoder: Decoder | None = None
    hybrid: Hybrid | None = None
    example: str = ""
    dropout: float = 0.0
    gpu: str  # name in the source
    device: str  # name of our preset, or of a published device
    devices: int
    network: Network | None = None
    cublas_workspace_nbytes: int | None = None
    framework: str = ""
    framework_version: str = ""
    profile: str
    features: tuple[str, ...] = ()
    precision: Precision
    sequence_length: int
    global_batch: int
    layout: Layout
    measured: Measurement = Measurement()


@frozen(kw_only=True)
class LeftOut:
    """A published run that is not predicted, with the reason and its figures."""

    id: str
    source: str
    reference: str = ""
    model: str = ""
    gpu: str = ""
    precision: str = ""
    mixture_of_experts: bool = False
    reason: str
    figures: dict[str, Any] = field(factory=dict, eq=False)


def read_record(line: str) -> RunRecord | LeftOut:
    """Parse one line of JSON. Raises UnfitError with the field that is wrong."""
    raw = parse_json(line)
    kind: type[RunRecord] | type[LeftOut] = LeftOut if "reason" in raw else RunRecord
    try:
        return _converter().structure(raw, kind)
    except Exception as error:
        raise UnfitError("; ".join(transform_error(error))) from None


def record_line(record: RunRecord | LeftOut) -> str:
    """Return a record as one line of JSON, without fields that have their default."""
    return json.dumps(_converter().unstructure(record), ensure_ascii=False, separators=(",", ":"))


def run_of_record(record: RunRecord) -> TrainingRun:
    """Return the run that a record describes. Raises UnfitError for an unknown profile, feature or device."""
    model, sparse = _model(record)
    layout = record.layout
    if layout.world != record.devices:
        raise UnfitError(f"the layout has {layout.world} devices, and {record.devices} were used")
    measured = record.measured
    sweep = (record.source, record.model, record.gpu, record.devices, record.global_batch, record.sequence_length)
    return TrainingRun(
        id=record.id,
        source=record.source,
        name=record.model,
        gpu=record.gpu,
        sparse=sparse,
        model=model,
        layout=layout,
        cluster=_cluster(record),
        workload=Workload(seq=record.sequence_length, batch=record.global_batch, precision=record.precision),
        profile=record_profile(record.profile, record.features),
        step_seconds=measured.step_seconds,
        memory_gib=measured.memory_gib,
        memory_kind=measured.memory_kind or "",
        last_rank=measured.last_rank,
        oom=measured.out_of_memory,
        sweep=" ".join(map(str, (*sweep, record.framework, record.precision))),
    )


@cache
def record_profile(name: str, features: tuple[str, ...]) -> FrameworkProfile:
    """Return the framework profile of this name with these features. Raises UnfitError for an unknown name."""
    for unknown in (*([name] if name not in PUBLISHED else []), *(f for f in features if f not in FEATURES)):
        known = FEATURES if name in PUBLISHED else PUBLISHED
        raise UnfitError(f"unknown framework profile or feature {unknown!r}; known: {', '.join(known)}")
    base = PUBLISHED[name]
    return compose(name, (FEATURES[feature] for feature in features), base) if features else base


def _model(record: RunRecord) -> tuple[Model, bool]:
    """Return the model of a record, and whether it is a mixture of experts."""
    dimensions = record.decoder or record.hybrid
    if dimensions is not None:
        return dimensions.model(record.dropout), bool(dimensions.experts)
    if not record.example:
        raise UnfitError("no model: give decoder, hybrid or example")
    example = named_example(record.example)
    return example.model, bool(example.experts)


def _cluster(record: RunRecord) -> Cluster:
    other = PUBLISHED_DEVICES.get(record.device)
    made = cluster(f"{record.devices}x{other.preset if other else record.device}")
    if other:
        made = evolve(made, device=other.changed(record.device, made.device))
    if record.cublas_workspace_nbytes is not None:
        made = evolve(made, device=evolve(made.device, library_nbytes=record.cublas_workspace_nbytes))
    if (network := record.network) is not None:
        bandwidth = network.gigabytes_per_second * 1e9
        inter = evolve(made.inter, name=network.name, bandwidth=bandwidth, efficiency=network.efficiency)
        made = evolve(made, inter=inter)
    return made


@cache
def _converter() -> Converter:
    """Return a converter that takes no text for a number and no unknown field, and omits defaults."""
    converter = Converter(forbid_extra_keys=True, omit_if_default=True)
    for kind, accepted in ((int, (int,)), (float, (int, float)), (str, (str,)), (bool, (bool,))):
        converter.register_structure_hook(kind, partial(_exactly, accepted))
    converter.register_structure_hook(Layout, lambda value, _: _layout(value))
    converter.register_unstructure_hook(Layout, _layout_json)
    return converter


def _layout(value: Any) -> Layout:
    """Return the layout that these fields describe; fields that are missing have their default."""
    if type(value) is not dict:
        raise ValueError(f"layout must be an object, got {value!r:.40}")
    if unknown := set(value) - set(FIELDS):
        raise ValueError(f"layout has an unknown field {min(unknown)!r}")
    try:
        return Layout(**{name: FIELDS[name].parse(given) for name, given in value.items()})
    except ValueError as error:
        raise ValueError(f"layout: {error}") from None


def _layout_json(layout: Layout) -> dict[str, Any]:
    """Return the fields of a layout that are not at their default."""
    default = layout_to_json(Layout(shard=layout.shard)) | {"shard": "none"}
    return {name: value for name, value in layout_to_json(layout).items() if value != default.get(name)}


def _exactly(accepted: tuple[type, ...], value: Any, kind: Callable[[Any], Any]) -> Any:
    if type(value) not in accepted:
        raise ValueError(f"must have type {getattr(kind, '__name__', kind)}, got {value!r:.40}")
    return kind(value)
