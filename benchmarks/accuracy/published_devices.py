"""Devices of published runs that no preset describes: each is a preset with other figures."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from attrs import evolve, frozen

from megaloom.planner.contract.devices import Device, GiB
from megaloom.planner.cost.profiles.figures import Figure, fitted
from megaloom.planner.cost.profiles.figures import FigureKind as Kind


@frozen(kw_only=True)
class PublishedDevice:
    """A device of published runs: its preset, and the figures in which it differs."""

    preset: str
    figures: Mapping[str, Figure]

    def changed(self, name: str, device: Device) -> Device:
        """Return the device of the preset under another name, with these figures."""
        return evolve(device, name=name, **{field: figure.value for field, figure in self.figures.items()})


_GRAND_TETON = "github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
PUBLISHED_DEVICES: Mapping[str, PublishedDevice] = MappingProxyType(
    {
        "H100-HBM2e-500W": PublishedDevice(
            preset="H100",
            figures={
                "nbytes": Figure(int(94.99 * GiB), Kind.ASSUMED, f"{_GRAND_TETON}: 96 GB"),
                "bandwidth": Figure(2.4e12, Kind.DATASHEET, f"{_GRAND_TETON}: HBM2e, 2.4 TB/s"),
                "sustained": fitted(0.69, f"torchtitan's runs at 500 W ({_GRAND_TETON}), of the fitted half"),
            },
        )
    }
)
