"""Names, memory and ports of the devices that `--gpus` knows. Imports nothing, so that `plan --help` can list them.

`planner/hardware/presets.py` has a preset for each of these names, with all other figures.
"""

from __future__ import annotations

_GIB = 2**30

# Bytes of a device as torch reports them (`torch.cuda.get_device_properties(0).total_memory`), which are fewer than its
# box says. Source: "total capacity of ..." in torch's out-of-memory messages, as users report them.
MEMORY = {
    "A100": int(79.15 * _GIB),
    "A100-40GB": int(39.39 * _GIB),
    "A800": int(79.15 * _GIB),
    "A100-PCIe": int(79.15 * _GIB),
    "A100-PCIe-40GB": int(39.39 * _GIB),
    "V100": int(31.74 * _GIB),
    "H100": int(79.10 * _GIB),
    "H800": int(79.10 * _GIB),
    "H200": int(139.80 * _GIB),
    "B200": int(178.35 * _GIB),
    "B300": int(268 * _GIB),  # as tables of published runs print it, so is that of the GB300
    "GB200": int(184.31 * _GIB),
    "GB300": int(278 * _GIB),
    "CPU": 4 * _GIB,  # a process's share when four of them have a machine of 16 GiB
}

# Bytes per second of one direction of PCIe, 16 lanes, from the specification of each generation.
PCIE3_PORT, PCIE4_PORT, PCIE5_PORT, PCIE6_PORT = 15.75e9, 31.5e9, 63e9, 121e9
# (limit of `intra`, limit of `inter`) of a device, in bytes per second of one direction: all of its NVLink, and its
# PCIe to the network card. From NVIDIA's datasheets. A cluster with a faster link is refused.
PORTS = {
    "V100": (150e9, PCIE3_PORT),
    **dict.fromkeys(("A100", "A100-40GB", "A100-PCIe", "A100-PCIe-40GB"), (300e9, PCIE4_PORT)),
    "A800": (200e9, PCIE4_PORT),
    **dict.fromkeys(("H100", "H200"), (450e9, PCIE5_PORT)),
    "H800": (200e9, PCIE5_PORT),
    "B200": (900e9, PCIE5_PORT),
    **dict.fromkeys(("B300", "GB200", "GB300"), (900e9, PCIE6_PORT)),
}
PORT_TOLERANCE = 1.02  # datasheets round
