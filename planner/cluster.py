"""Devices, the links between them, and the clusters they make.

`cluster("64xH100")` makes one from the presets below; every figure in them has its source beside it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Any

from attrs import Attribute, evolve, field, frozen

from megaloom.dsl.errors import UserError

GiB = 2**30

# Bytes that torch.cuda reports in all, less than what is printed on the box: read off the "total capacity of …"
# of torch's own out-of-memory messages, as users report them.
MEMORY = {
    "A100": int(79.15 * GiB),
    "A100-40GB": int(39.39 * GiB),
    "H100": int(79.10 * GiB),
    "H200": int(139.80 * GiB),
    "B200": int(178.35 * GiB),
    "GB200": int(184.31 * GiB),
    "CPU": 4 * GiB,  # a process's share when four of them have a machine of 16 GiB
}


def within(low: float, high: float, unit: str) -> Callable[[Any, Attribute[Any], float], None]:
    """A validator: the figure lies in [low, high] of `unit`, outside of which it is a slip of the pen."""

    def check(owner: Any, attribute: Attribute[Any], value: float) -> None:
        if not low <= value <= high:  # also refuses nan
            what = f"{type(owner).__name__} {getattr(owner, 'name', '')}".strip()
            raise UserError(
                f"{what}: {attribute.name} = {value:g} is not plausible\n"
                f"{attribute.name} is in {unit}, from {low:g} to {high:g}"
            )

    return check


def _flops(owner: Device, attribute: Attribute[Any], value: dict[str, float]) -> None:
    if not value:
        raise UserError(f"Device {owner.name}: flops is empty\ngive a peak for each precision, as {{'bf16': 1e15}}")
    for flops in value.values():
        within(1e8, 1e17, "FLOP/s")(owner, attribute, flops)


def _nbytes(owner: Device, attribute: Attribute[Any], value: int) -> None:
    within(2**20, 2**43, "bytes")(owner, attribute, value)
    known = MEMORY.get(owner.name, value) if owner.name != "CPU" else value
    if not 0.9 * known <= value <= 1.1 * known:
        raise UserError(
            f"Device {owner.name}: nbytes is {value / GiB:.1f} GiB, but a {owner.name} has {known / GiB:.1f} GiB\n"
            "give the right memory, or the device another name"
        )


@frozen(kw_only=True)
class Device:
    """One accelerator (or one CPU process), by its datasheet and by what it was measured to reach."""

    name: str
    flops: dict[str, float] = field(hash=False, validator=_flops)  # peak FLOP/s of a matrix product, by Precision value
    nbytes: int = field(validator=_nbytes)  # memory
    bandwidth: float = field(validator=within(1e8, 1e14, "bytes/s"))  # peak of that memory, read + written
    flops_efficiency: float = field(default=1.0, validator=within(0.01, 1, "shares of the peak"))
    """What a large matrix product reaches of `flops`."""
    bandwidth_efficiency: float = field(default=1.0, validator=within(0.01, 1, "shares of the peak"))
    """What a large copy reaches of `bandwidth`."""
    launch_seconds: float = field(default=0.0, validator=within(0, 1, "seconds"))
    """What one small kernel takes at least, with the host's part in it."""
    attend_efficiency: float = field(default=1.0, validator=within(0.01, 1, "shares of the peak"))
    """What fused attention reaches of `flops` on long sequences, heads of 128, causal work counted as half."""
    sustained: float = field(default=1.0, validator=within(0.1, 1, "shares of the best"))
    """What is left of `flops` in a training step, at the clock that the power limit leaves."""
    units: int = field(default=1, validator=within(1, 10**6, "multiprocessors"))
    """How many multiprocessors the tiles of a matrix product are dealt to."""
    context_nbytes: int = field(default=0, validator=within(0, 2**40, "bytes"))
    """What the driver, the libraries and the process take before the first tensor."""


@frozen(kw_only=True)
class Link:
    """What joins a device to others: a message takes latency + steps * hop + bytes / (bandwidth * efficiency).

    `steps` are those of the collective after the first: n - 2 for an all-gather in a ring of n, 0 for a send.
    """

    name: str
    bandwidth: float = field(validator=within(1e6, 1e13, "bytes/s"))  # of one device, one way
    latency: float = field(validator=within(0, 1, "seconds"))  # before the first byte
    hop: float = field(default=0.0, validator=within(0, 1, "seconds"))
    efficiency: float = field(default=1.0, validator=within(0.01, 1, "shares of the bandwidth"))
    group_nbytes: int = field(default=0, validator=within(0, 2**40, "bytes"))
    """What the buffers of one group of devices take on each of them."""


@frozen(kw_only=True)
class Cluster:
    """`count` devices, `per_node` of them in each node, joined by `intra` within a node and by `inter` across.

    A node is what the fast link spans: a box of 8, or as much of a rack of 72 as is used.
    """

    device: Device
    count: int = field(validator=within(1, 10**6, "devices"))
    per_node: int = field(validator=within(1, 10**6, "devices"))
    intra: Link
    inter: Link

    def __attrs_post_init__(self) -> None:
        if self.count % self.per_node:
            raise UserError(
                f"{self.count} devices do not fill nodes of {self.per_node}\n"
                f"{self.count // self.per_node * self.per_node or self.per_node} or "
                f"{-(-self.count // self.per_node) * self.per_node} would"
            )
        for link in (self.intra, self.inter):
            if link.bandwidth > self.device.bandwidth:
                raise UserError(
                    f"{link.name} at {link.bandwidth:g} bytes/s is faster than the memory of a {self.device.name}, "
                    f"{self.device.bandwidth:g} bytes/s, that it reads from\n"
                    "bandwidth is in bytes/s: 400 Gb/s is 50e9"
                )

    @property
    def nodes(self) -> int:
        """How many nodes the devices fill."""
        return self.count // self.per_node

    def __str__(self) -> str:
        return f"{self.count}x{self.device.name}"


@frozen(kw_only=True)
class Preset:
    """A kind of device and how it comes: `tray` of them are had together, up to `domain` of them share `intra`."""

    device: Device
    intra: Link
    inter: Link
    domain: int
    tray: int


# The buffers of one NCCL communicator of more than two devices, on four A100 (github.com/NVIDIA/nccl/issues/964).
NCCL_GROUP = 688 * 10**6


# NVLink, one way, from the datasheets of the GPUs (which print the sum of both ways). Of it, 0.755 is the mean of
# all-reduce, all-gather, reduce-scatter, all-to-all and a ring of sends of 1 GiB over four H200, measured for this
# project (354, 326, 322, 337, 360 GB/s of 450); NVIDIA says 370 (github.com/NVIDIA/nccl-tests/issues/212). Taken to be
# the same share for the other generations, which were not measured. Latency and hop: NCCL's own tuning table for the
# ring (src/graph/tuning.cc: base 8.4 us, NVLink 3.4 us, network 14 us). It gives 25 us for the all-reduce over four
# that took 25, and 15 us for the all-gather that took 17.
def _nvlink(generation: int, bandwidth: float) -> Link:
    return Link(
        name=f"NVLink {generation}",
        bandwidth=bandwidth,
        latency=8.4e-6,
        hop=3.4e-6,
        efficiency=0.755,
        group_nbytes=NCCL_GROUP,
    )


# One network card a GPU. Of 50 GB/s NCCL gets 46 to 48 (github.com/NVIDIA/nccl-tests/issues/290).
def _infiniband(name: str, bandwidth: float) -> Link:
    return Link(
        name=f"InfiniBand {name}",
        bandwidth=bandwidth,
        latency=8.4e-6,
        hop=14e-6,
        efficiency=0.92,
        group_nbytes=NCCL_GROUP,
    )


NVLINK3, NVLINK4, NVLINK5 = _nvlink(3, 300e9), _nvlink(4, 450e9), _nvlink(5, 900e9)
HDR, NDR = _infiniband("HDR", 25e9), _infiniband("NDR", 50e9)  # DGX A100: 200 Gb/s a GPU; DGX H100, B200, NVL72: 400

# Not measured: what an eager torch kernel costs the host at the least. A CUDA graph would hide it.
LAUNCH = 5e-6

# - flops: dense, from NVIDIA's datasheets, bf16 on the tensor cores, fp32 on the CUDA cores (torch does not use TF32
#   unless told to).
# - flops_efficiency: the best large bf16 product found by github.com/stas00/ml-engineering (MAMF table: A100 267.9,
#   H100 and H200 794.5, B200 1745 TFLOP/s); measured for this project on the H200: 790.
# - bandwidth, units: datasheets.
# - bandwidth_efficiency: a device copy on the H200 moves 4.3 TB/s of 4.8, measured for this project; taken to be the
#   same share for the others.
# - attend_efficiency: cuDNN's forward on an H100, causal, heads of 128, reaches 539 TFLOP/s at 16k (Shah et al.,
#   arXiv:2407.08608, figure 5), its backward 516 (figure 6); FlashAttention-2 gets 50-73 % of an A100 (Dao,
#   arXiv:2307.08691); the other generations are taken to be as the H100.
# - sustained: in the profile of a training step on the H200, measured for this project (70 % of the time at 514 model
#   TFLOP/s), matrix products run at 680 TFLOP/s where alone they reach 790, of which their shapes explain 3 to 4 %;
#   taken to be the same for what came later, and an A100 to keep its clock.
# - context_nbytes: not measured here, as nvidia-smi shows it for a process that has made one tensor and one product.
CONTEXT = int(0.6 * GiB)
A100 = Device(  # SXM, 80 GB
    name="A100",
    flops={"bf16": 312e12, "fp32": 19.5e12},
    nbytes=MEMORY["A100"],
    bandwidth=2.039e12,
    flops_efficiency=0.859,
    bandwidth_efficiency=0.896,
    launch_seconds=LAUNCH,
    attend_efficiency=0.58,
    units=108,
    context_nbytes=CONTEXT,
)
H100 = Device(  # SXM
    name="H100",
    flops={"bf16": 989.4e12, "fp32": 66.9e12},
    nbytes=MEMORY["H100"],
    bandwidth=3.35e12,
    flops_efficiency=0.80,
    bandwidth_efficiency=0.896,
    launch_seconds=LAUNCH,
    attend_efficiency=0.545,
    sustained=0.88,
    units=132,
    context_nbytes=CONTEXT,
)
B200 = Device(  # HGX, 1,000 W
    name="B200",
    flops={"bf16": 2.25e15, "fp32": 75e12},
    nbytes=MEMORY["B200"],
    bandwidth=8e12,
    flops_efficiency=0.776,
    bandwidth_efficiency=0.896,
    launch_seconds=LAUNCH,
    attend_efficiency=0.545,
    sustained=0.88,
    units=148,
    context_nbytes=CONTEXT,
)
A100_40 = evolve(A100, name="A100-40GB", nbytes=MEMORY["A100-40GB"], bandwidth=1.555e12)
H200 = evolve(H100, name="H200", nbytes=MEMORY["H200"], bandwidth=4.8e12)
# NVL72, 1,200 W: 180 PFLOP/s dense bf16, 5.76 PFLOP/s fp32, 576 TB/s in a rack of 72.
GB200 = evolve(B200, name="GB200", flops={"bf16": 2.5e15, "fp32": 80e12}, nbytes=MEMORY["GB200"], units=152)
# Measured for this project on a virtual machine with 2 cores of an AMD EPYC with AVX-512, torch 2.13, four processes of
# one thread at a time, best of 5, the slowest process counted: matrix products of 512 (fp32) and 1024 (bf16), a copy of
# 32 MiB; launch: what a small block's forward and backward takes more than its products do, by kernel (1.5 ms, about
# 75). One or two processes alone are about twice as fast.
CPU = Device(
    name="CPU",
    flops={"fp32": 52e9, "bf16": 117e9},
    nbytes=MEMORY["CPU"],
    bandwidth=17e9,
    launch_seconds=20e-6,
    attend_efficiency=0.5,  # not measured
    context_nbytes=GiB // 2,  # python, torch and megatron-core
)
# The same machine, gloo over loopback, four processes, best of 9. A send of 1 KiB 0.25 ms, an all-gather 1.2, an
# all-reduce 2.1; of 32 MiB a send 1.3 GB/s, and bus bandwidths from 0.25 (all-gather) to 1.2 (all-reduce).
LOOPBACK = Link(name="gloo on loopback", bandwidth=1.3e9, latency=0.25e-3, hop=0.4e-3, efficiency=0.6)


_BOX = {"domain": 8, "tray": 8}
PRESETS = {
    preset.device.name: preset
    for preset in (
        Preset(device=A100, intra=NVLINK3, inter=HDR, **_BOX),
        Preset(device=A100_40, intra=NVLINK3, inter=HDR, **_BOX),
        Preset(device=H100, intra=NVLINK4, inter=NDR, **_BOX),
        Preset(device=H200, intra=NVLINK4, inter=NDR, **_BOX),
        Preset(device=B200, intra=NVLINK5, inter=NDR, **_BOX),
        Preset(device=GB200, intra=NVLINK5, inter=NDR, domain=72, tray=4),
        Preset(device=CPU, intra=LOOPBACK, inter=LOOPBACK, domain=10**6, tray=1),  # one machine, however many
    )
}
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
