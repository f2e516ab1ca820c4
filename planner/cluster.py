"""Devices, the links between them, and the clusters they make."""

from __future__ import annotations

from attrs import field, frozen


@frozen(kw_only=True)
class Device:
    """One accelerator (or one CPU process), by its datasheet and by what it was measured to reach."""

    name: str
    flops: dict[str, float] = field(hash=False)  # peak FLOP/s of a dense matrix product, by Precision value
    nbytes: int  # memory
    bandwidth: float  # bytes/s of that memory, read + written


@frozen(kw_only=True)
class Link:
    """What joins a device to others: bytes/s one way, and seconds before the first byte."""

    name: str
    bandwidth: float
    latency: float


@frozen(kw_only=True)
class Cluster:
    """`count` devices, `per_node` of them in each node, joined by `intra` within a node and by `inter` across."""

    device: Device
    count: int
    per_node: int
    intra: Link
    inter: Link

    def __str__(self) -> str:
        return f"{self.count}x{self.device.name}"
