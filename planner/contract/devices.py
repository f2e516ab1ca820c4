"""Devices, links and clusters as values. `hardware.presets` has the known ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from statistics import NormalDist
from typing import Any

from attrs import Attribute, evolve, field, frozen

from megaloom.dsl.errors import UserError

from .calibration import Calibration
from .known_devices import MEMORY, PORT_TOLERANCE, PORTS

GiB = 2**30

# By how much chips of one kind differ in the clock that their power limit leaves, one standard deviation. GPUs of one
# kind differ by 8 % in the mean of five computing centers (Sinha et al., arXiv:2208.11035), taken to be the width
# between the whiskers of a box plot, 5.4 standard deviations. Where the batch grows with the devices, steps of one half
# of the published models take 0.3 to 0.5 % longer with each doubling, which is as much.
VARIATION = 0.08 / 5.4
# Unexpected interruptions of a job, by device and hour: 419 in 54 days of 16,384 H100 (Llama 3, arXiv:2407.21783,
# section 3.3.4). Others had 6.5 and 2.3 in 1,000 days of a node of 8 A100, 3.4e-5 and 1.2e-5 by hour (Kokolis et al.,
# arXiv:2410.21680), and at least 105 in 2 months of 992 A100, 7.4e-5 (OPT-175B, arXiv:2205.01068,
# section 2.5).
FAILURES = 419 / (54 * 24 * 16_384)
# Bytes a second of a checkpoint that a device's share of the storage takes: 2 TB/s of a cluster of 24,576 (Llama 3,
# section 3.3.1).
STORAGE = 2e12 / 24_576


def within(low: float, high: float, unit: str) -> Callable[[Any, Attribute[Any], float], None]:
    """Return an attrs validator that refuses values outside [low, high], which are mistakes of units or digits."""

    def check(owner: Any, attribute: Attribute[Any], value: float) -> None:
        if not low <= value <= high:  # also refuses nan
            what = f"{type(owner).__name__} {getattr(owner, 'name', '')}".strip()
            raise UserError(
                f"{what}: {attribute.name} = {value:g} is not plausible\n"
                f"{attribute.name} is in {unit}, from {low:g} to {high:g}"
            )

    return check


def a(name: str) -> str:
    """Return the name of a device with its article."""
    return f"{'an' if name[0] in 'AH' else 'a'} {name}"


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
            f"Device {owner.name}: nbytes is {value / GiB:.1f} GiB, but {a(owner.name)} has {known / GiB:.1f} GiB\n"
            "give the right memory, or the device another name"
        )


@frozen(kw_only=True)
class Device:
    """One accelerator, or one CPU process: peaks from its datasheet, and the measured shares of them."""

    name: str  # such as H100
    flops: dict[str, float] = field(hash=False, validator=_flops)  # peak FLOP/s of a matrix product, by Precision value
    nbytes: int = field(validator=_nbytes)  # bytes of its memory
    bandwidth: float = field(validator=within(1e8, 1e14, "bytes/s"))  # peak bytes/s, read + written
    flops_efficiency: float = field(default=1.0, validator=within(0.01, 1, "shares of flops"))
    """Share of `flops` that a large matrix product reaches."""
    narrow_efficiency: float = field(default=1.0, validator=within(0.1, 1, "shares of flops_efficiency"))
    """Factor on `flops_efficiency` for matrix products below 16 bits."""
    nvfp4_efficiency: float = field(
        default=1.0, validator=within(0.1, 1, "shares of flops_efficiency * narrow_efficiency")
    )
    """Factor on `flops_efficiency * narrow_efficiency` for matrix products of 4 bits."""
    bandwidth_efficiency: float = field(default=1.0, validator=within(0.01, 1, "shares of bandwidth"))
    """Share of `bandwidth` that a large copy reaches."""
    launch_seconds: float = field(default=0.0, validator=within(0, 1, "seconds"))
    """Least time of one small kernel, with the launch by the host."""
    attend_efficiency: float = field(default=1.0, validator=within(0.01, 1, "shares of flops"))
    """Share of `flops` that fused attention reaches on long sequences, heads of 128, causal work counted half."""
    sustained: float = field(default=1.0, validator=within(0.1, 1, "shares of flops"))
    """Share of `flops` left in a training step, at the clock that the power limit allows."""
    units: int = field(default=1, validator=within(1, 10**6, "multiprocessors"))
    """Streaming multiprocessors (SMs)."""
    library_nbytes: int = field(default=0, validator=within(0, 2**40, "bytes"))
    """Workspace of cuBLAS, for each library that calls it."""
    context_nbytes: int = field(default=0, validator=within(0, 2**40, "bytes"))
    """Memory of driver, libraries and process before the first tensor."""

    @property
    def moves(self) -> float:
        """Return the bytes per second of memory-bound work, reads and writes together."""
        return self.bandwidth * self.bandwidth_efficiency


@frozen(kw_only=True)
class Link:
    """Connection of a device to others: a message takes latency + steps * hop + bytes / (bandwidth * efficiency).

    `steps` are those of the collective after the first: n - 2 for an all-gather in a ring of n, 0 for a send.
    """

    name: str  # such as NVLink 4
    bandwidth: float = field(validator=within(1e6, 1e13, "bytes/s"))  # bytes/s of one device, one way
    latency: float = field(validator=within(0, 1, "seconds"))  # seconds before the first byte
    hop: float = field(default=0.0, validator=within(0, 1, "seconds"))  # seconds of each later step of a collective
    efficiency: float = field(default=1.0, validator=within(0.01, 1, "shares of bandwidth"))
    """Share of `bandwidth` that a large message reaches."""
    group_nbytes: int = field(default=0, validator=within(0, 2**40, "bytes"))
    """Communication buffers of one process group, on each of its devices."""
    peer_nbytes: int = field(default=0, validator=within(0, 2**40, "bytes"))
    """Further communication buffers of an all-to-all, for each other device of the group."""

    @property
    def reached(self) -> float:
        """Return the bytes per second of a large message."""
        return self.bandwidth * self.efficiency


@frozen(kw_only=True)
class Cluster:
    """`count` devices, `per_node` of them in each node, joined by `intra` within a node and by `inter` across.

    A node is what the fast link spans: a box of 8, or as much of a rack of 72 as is used. `inter` is one device's share
    of its node's network, a card each (a rail) or less. Beyond a pod, the devices below one set of switches, of which
    all of them can send at full speed, that share is divided by `oversubscription`.
    """

    device: Device  # one of the devices, which are all alike
    count: int = field(validator=within(1, 10**6, "devices"))  # number of devices
    per_node: int = field(validator=within(1, 10**6, "devices"))  # devices of one node
    intra: Link  # between devices of one node
    inter: Link  # between devices of different nodes
    pod: int = field(default=0, validator=within(0, 10**6, "devices"))  # devices of one pod; 0: all are in one
    oversubscription: float = field(default=1.0, validator=within(1, 1000, "times"))
    """Factor by which the network beyond a pod is slower."""
    failures: float = field(default=FAILURES, validator=within(0, 1, "interruptions per device and hour"))
    """Unexpected interruptions of a job, by device and hour."""
    storage: float = field(default=STORAGE, validator=within(1e3, 1e12, "bytes/s of a device's checkpoint"))
    """Bytes per second of a checkpoint that a device's share of the storage takes."""
    source: str = ""
    """The cluster file that declares it; empty for a preset."""
    calibration: Calibration | None = None
    """Measured runs to which its figures were fitted; null if there are none."""

    def __attrs_post_init__(self) -> None:
        if self.count % self.per_node:
            below = self.count // self.per_node * self.per_node
            works = f"{below} or {below + self.per_node}" if below else f"{self.per_node}"
            raise UserError(
                f"{self.count} devices are not a whole number of nodes of {self.per_node}\nuse {works} devices"
            )
        if self.oversubscription > 1 and not self.pod:
            raise UserError(
                f"oversubscription = {self.oversubscription:g} needs pod\n"
                "give pod, the number of devices below one set of switches"
            )
        if self.pod < self.count and self.pod % self.per_node:
            raise UserError(
                f"pod = {self.pod} is not a whole number of nodes of {self.per_node} devices\n"
                f"use pod = {max(1, self.pod // self.per_node) * self.per_node}"
            )
        for link, port in zip((self.intra, self.inter), PORTS.get(self.device.name, ()), strict=False):
            self._no_faster(link, f"port of {a(self.device.name)}", PORT_TOLERANCE * port)
        for link in (self.intra, self.inter):
            self._no_faster(link, f"memory of {a(self.device.name)}", self.device.bandwidth)

    def _no_faster(self, link: Link, what: str, limit: float) -> None:
        if link.bandwidth > limit:
            raise UserError(
                f"{link.name} at {link.bandwidth:g} bytes/s is faster than the {what}, {limit:g} bytes/s\n"
                "give the bandwidth of one device in one direction, in bytes/s: 400 Gb/s is 50e9"
            )

    @property
    def nodes(self) -> int:
        """Return the number of nodes."""
        return self.count // self.per_node

    @property
    def outer(self) -> Link:
        """Return the link between devices of different nodes, or of the only node."""
        return self.inter if self.nodes > 1 else self.intra

    @cached_property
    def slowest(self) -> Device:
        """Return the slowest device, which all others wait for in each step, where the power limit sets the clock."""
        if self.device.sustained == 1.0:
            return self.device
        behind = VARIATION * NormalDist().inv_cdf((self.count - 0.375) / (self.count + 0.25))  # Blom, 1958
        return evolve(self.device, sustained=self.device.sustained / (1 + behind))

    @cached_property
    def levels(self) -> tuple[tuple[int, float], ...]:
        """Return (devices, bytes per second of one device) of each network level: node, pod, whole cluster."""
        node = (self.per_node, self.intra.reached)
        if self.nodes == 1:
            return (node,)
        if not 0 < self.pod < self.count:
            return node, (self.count, self.inter.reached)
        return node, (self.pod, self.inter.reached), (self.count, self.inter.reached / self.oversubscription)

    @property
    def kind(self) -> str:
        """Return the part of its name after the x: a device, or a cluster file."""
        return self.source or self.device.name

    def __str__(self) -> str:
        return f"{self.count}x{self.kind}"


@frozen(kw_only=True)
class Preset:
    """A device with its links. Systems come in units of `tray` devices; up to `domain` devices share `intra`."""

    device: Device
    intra: Link
    inter: Link
    domain: int
    tray: int
