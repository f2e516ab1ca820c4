"""Presets of devices and links, and the unit, kind and source of each of their figures.

`PRESETS[name]` is a device with its links. `DEVICE_FIGURES` and `LINK_FIGURES` have one entry for each field;
`docs/accuracy/constants.md` prints them beside the values.
"""

from __future__ import annotations

from attrs import evolve, frozen

from megaloom.planner.contract.devices import (
    Device,
    GiB,
    Link,
    Preset,
)
from megaloom.planner.contract.known_devices import MEMORY
from megaloom.planner.cost.profiles.figures import FigureKind


@frozen
class HardwareFigure:
    """Unit, kind and source of one field of a device or a link, over all presets."""

    unit: str
    kind: FigureKind
    source: str


_DATASHEET, _MEASURED, _FITTED, _CODE, _ = FigureKind
DEVICE_FIGURES = {
    "flops": HardwareFigure(
        "FLOP/s by precision",
        _DATASHEET,
        "NVIDIA's datasheets, dense: bf16 on the tensor cores, fp32 on the CUDA cores, because torch uses no TF32 by "
        "default. GB200 and GB300: a rack of 72 has 180 PFLOP/s in bf16 and 5.76 in fp32",
    ),
    "nbytes": HardwareFigure(
        "bytes",
        _MEASURED,
        'total memory as torch reports it: "total capacity of" in users\' out-of-memory messages; B300 and GB300: '
        "published tables of runs",
    ),
    "bandwidth": HardwareFigure(
        "bytes/s", _DATASHEET, "NVIDIA's datasheets; GB200 and GB300: 576 TB/s in a rack of 72"
    ),
    "flops_efficiency": HardwareFigure(
        "share of flops",
        _MEASURED,
        "best large bf16 product of github.com/stas00/ml-engineering (table MAMF: A100 267.9, H100 and H200 794.5, "
        "B200 1,745 TFLOP/s); H200: this project, `megaloom measure` with cuBLAS 13, products of layers at 785 to "
        "811 TFLOP/s after pauses. Others as the base of their generation",
    ),
    "narrow_efficiency": HardwareFigure(
        "share of flops_efficiency",
        _FITTED,
        "1: products below 16 bits are assumed to reach the 16-bit share of their own peak; `megaloom measure` "
        "replaces it",
    ),
    "nvfp4_efficiency": HardwareFigure(
        "share of flops_efficiency * narrow_efficiency",
        _FITTED,
        "GB300: published runs of one half of the models. Its peak is 1.5 times the GB200's, and its steps are not "
        "faster for it",
    ),
    "bandwidth_efficiency": HardwareFigure(
        "share of bandwidth",
        _MEASURED,
        "this project, on an H200: a copy within the device moves 4.3 TB/s of 4.8; assumed for the other GPUs",
    ),
    "launch_seconds": HardwareFigure(
        "seconds per kernel",
        _MEASURED,
        "this project, `megaloom measure` on two H200: host time of an eager torch kernel; assumed for the other GPUs",
    ),
    "attend_efficiency": HardwareFigure(
        "share of flops",
        _MEASURED,
        "H100: cuDNN, causal, heads of 128, 16k tokens, forward 539 TFLOP/s, backward 516 (arXiv:2407.08608, figures 5 "
        "and 6). A100: FlashAttention-2 reaches 50 to 73 % (arXiv:2307.08691). The others are assumed to be like these",
    ),
    "sustained": HardwareFigure(
        "share of flops",
        _FITTED,
        "H100, H200: measured by this project in a training step on an H200, where products run at 680 TFLOP/s that "
        "reach 790 alone; their shapes explain 3 to 4 %. A100: 1, it keeps its clock; over PCIe (250 to 300 W) less. "
        "Blackwell, by power limit (B200 1,000 W, B300 1,100, GB200 1,200, GB300 1,400): dense published runs of one "
        "half of the models, from two to five sources for each device. All are of a chip in the middle "
        "of the variation",
    ),
    "units": HardwareFigure("multiprocessors", _DATASHEET, "NVIDIA's datasheets"),
    "library_nbytes": HardwareFigure(
        "bytes",
        _CODE,
        "torch, aten/src/ATen/cuda/CUDABlas.cpp, getChosenWorkspaceSize: 2 x 4 MiB and 8 x 16 KiB; 32 MiB "
        "from Hopper on",
    ),
    "context_nbytes": HardwareFigure(
        "bytes",
        _MEASURED,
        "this project, on an H200, as what torch does not reserve: 0.68 GiB once products, attention and norms have "
        "run, and 0.35 for NCCL without its communicators. Before CUDA 11.7, which loaded all kernels, more than 1 GB "
        "(github.com/pytorch/pytorch/issues/107667). Assumed for the other GPUs",
    ),
}
LINK_FIGURES = {
    "bandwidth": HardwareFigure(
        "bytes/s of one direction, for each device",
        _DATASHEET,
        "NVLink: the datasheets of the GPUs, which print the sum of both directions. InfiniBand: one card for each GPU "
        "(DGX A100 200 Gb/s; DGX H100, B200 and NVL72 400; with B300 and GB300 800), but DGX-1 with V100 has four "
        "cards of 100 for 8 GPUs. PCIe 4: 16 lanes",
    ),
    "latency": HardwareFigure("seconds", _CODE, "NCCL, src/graph/tuning.cc: base latency of a ring"),
    "hop": HardwareFigure(
        "seconds per step",
        _CODE,
        "NCCL, src/graph/tuning.cc. An all-reduce over four H200 is predicted to take 25 us and took 25, an all-gather "
        "15 and took 17. PCIe is a guess",
    ),
    "efficiency": HardwareFigure(
        "share of bandwidth",
        _MEASURED,
        "NVLink: this project, on four H200, mean of all-reduce, all-gather, reduce-scatter, all-to-all and a ring of "
        "sends of 1 GiB (354, 326, 322, 337, 360 GB/s of 450); NVIDIA says 370 "
        "(github.com/NVIDIA/nccl-tests/issues/212). Assumed for the other generations and PCIe. InfiniBand: NCCL "
        "reaches 46 to 48 GB/s of 50 (github.com/NVIDIA/nccl-tests/issues/290)",
    ),
    "group_nbytes": HardwareFigure(
        "bytes of a process group", _MEASURED, "four A100 (github.com/NVIDIA/nccl/issues/964)"
    ),
    "peer_nbytes": HardwareFigure(
        "bytes for each peer of an all-to-all",
        _MEASURED,
        "eight H100 of a node went from 1.06 to 4.34 GB, in pieces of 10 MiB for each of up to 32 channels "
        "(github.com/NVIDIA/nccl/issues/1685)",
    ),
}
# Presets whose figures have another source than the tables above say.
OTHER_SOURCES = {
    "CPU": "measured by this project on a virtual machine with 2 cores of an AMD EPYC with AVX-512, torch 2.13, with "
    "four processes of one thread at a time; the best of 5, of the slowest process: matrix products of size 512 (fp32) "
    "and 1024 (bf16), and a copy of 32 MiB. A kernel's launch: 1.5 ms, by which forward and backward of a small block "
    "exceed its products, over about 75 kernels. The share of attention is a guess. One or two processes alone are "
    "about twice as fast. fp16: torch 2.11, one process, size 512; it has no vectorised kernel",
    "gloo on loopback": "measured by this project on the same machine, with four processes; the best of 9. 1 KiB: a "
    "send 0.25 ms, an all-gather 1.2, an all-reduce 2.1. 32 MiB: a send 1.3 GB/s, bus bandwidths of 0.25 (all-gather) "
    "to 1.2 (all-reduce)",
}

# `_link` gives every GPU link these figures. Buffers of an NCCL communicator of more than two devices, and those of an
# all-to-all for each peer.
NCCL_GROUP = 688 * 10**6
NCCL_PEER = int((4.34e9 - 1.06e9) / 7)


def _link(name: str, bandwidth: float, hop: float, efficiency: float) -> Link:
    return Link(
        name=name,
        bandwidth=bandwidth,
        latency=8.4e-6,
        hop=hop,
        efficiency=efficiency,
        group_nbytes=NCCL_GROUP,
        peer_nbytes=NCCL_PEER,
    )


NVLINK2, NVLINK3, NVLINK4, NVLINK5 = (
    _link(f"NVLink {n}", bandwidth, 3.4e-6, 0.755) for n, bandwidth in ((2, 150e9), (3, 300e9), (4, 450e9), (5, 900e9))
)
NVLINK_800 = evolve(NVLINK4, bandwidth=200e9)  # of the A800 and the H800
PCIE4 = _link("PCIe 4", 31.5e9, 6e-6, 0.755)
EDR, HDR, NDR, XDR = (
    _link(f"InfiniBand {name}", bandwidth, 14e-6, 0.92)
    for name, bandwidth in (("EDR", 6.25e9), ("HDR", 25e9), ("NDR", 50e9), ("XDR", 100e9))
)

LAUNCH = 14e-6
CONTEXT = int((0.68 + 0.35) * GiB)
MIB = 2**20
A100 = Device(  # SXM, 80 GB
    name="A100",
    flops={"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12},
    nbytes=MEMORY["A100"],
    bandwidth=2.039e12,
    flops_efficiency=0.859,
    bandwidth_efficiency=0.896,
    launch_seconds=LAUNCH,
    attend_efficiency=0.58,
    units=108,
    library_nbytes=8 * MIB + 2**17,
    context_nbytes=CONTEXT,
)
H100 = Device(  # SXM
    name="H100",
    flops={"bf16": 989.4e12, "fp16": 989.4e12, "fp8": 1978.9e12, "fp32": 66.9e12},
    nbytes=MEMORY["H100"],
    bandwidth=3.35e12,
    flops_efficiency=0.80,
    bandwidth_efficiency=0.896,
    launch_seconds=LAUNCH,
    attend_efficiency=0.52,
    sustained=0.88,
    units=132,
    library_nbytes=32 * MIB,
    context_nbytes=CONTEXT,
)
B200 = Device(  # HGX, 1,000 W
    name="B200",
    flops={"bf16": 2.25e15, "fp16": 2.25e15, "fp8": 4.5e15, "mxfp8": 4.5e15, "nvfp4": 9e15, "fp32": 75e12},
    nbytes=MEMORY["B200"],
    bandwidth=8e12,
    flops_efficiency=0.776,
    bandwidth_efficiency=0.896,
    launch_seconds=LAUNCH,
    attend_efficiency=0.545,
    sustained=0.66,
    units=148,
    library_nbytes=32 * MIB,
    context_nbytes=CONTEXT,
)
# Devices of a generation differ from its first one in the figures given here; `evolve` takes all others from it.
A100_PCIE = evolve(A100, name="A100-PCIe", nbytes=MEMORY["A100-PCIe"], bandwidth=1.935e12, sustained=0.85)
A100_PCIE_40 = evolve(A100_PCIE, name="A100-PCIe-40GB", nbytes=MEMORY["A100-PCIe-40GB"], bandwidth=1.555e12)
V100 = evolve(  # SXM2, 32 GB
    A100, name="V100", flops={"fp16": 125e12, "fp32": 15.7e12}, nbytes=MEMORY["V100"], bandwidth=0.9e12, units=80
)
A100_40 = evolve(A100, name="A100-40GB", nbytes=MEMORY["A100-40GB"], bandwidth=1.555e12)
A800 = evolve(A100, name="A800", nbytes=MEMORY["A800"])
H800 = evolve(H100, name="H800", nbytes=MEMORY["H800"])
H200 = evolve(H100, name="H200", nbytes=MEMORY["H200"], bandwidth=4.8e12, flops_efficiency=0.84, attend_efficiency=0.54)
_GB200 = {"bf16": 2.5e15, "fp16": 2.5e15, "fp8": 5e15, "mxfp8": 5e15, "nvfp4": 10e15, "fp32": 80e12}
GB200 = evolve(B200, name="GB200", flops=_GB200, nbytes=MEMORY["GB200"], sustained=0.72, units=152)
B300 = evolve(B200, name="B300", flops={**B200.flops, "nvfp4": 13.5e15}, nbytes=MEMORY["B300"], sustained=0.69)
GB300 = evolve(
    GB200,
    name="GB300",
    flops={**_GB200, "nvfp4": 15e15},
    nbytes=MEMORY["GB300"],
    sustained=0.91,
    nvfp4_efficiency=0.65,
)
CPU = Device(
    name="CPU",
    flops={"fp32": 52e9, "bf16": 117e9, "fp16": 0.7e9},
    nbytes=MEMORY["CPU"],
    bandwidth=17e9,
    launch_seconds=20e-6,
    attend_efficiency=0.5,  # not measured
    context_nbytes=GiB // 2,  # python, torch and megatron-core
)
LOOPBACK = Link(name="gloo on loopback", bandwidth=1.3e9, latency=0.25e-3, hop=0.4e-3, efficiency=0.6)


_BOX = {"domain": 8, "tray": 8}
PRESETS = {
    preset.device.name: preset
    for preset in (
        Preset(device=A100, intra=NVLINK3, inter=HDR, **_BOX),
        Preset(device=A100_40, intra=NVLINK3, inter=HDR, **_BOX),
        Preset(device=A800, intra=NVLINK_800, inter=HDR, **_BOX),
        Preset(device=A100_PCIE, intra=PCIE4, inter=HDR, **_BOX),
        Preset(device=A100_PCIE_40, intra=PCIE4, inter=HDR, **_BOX),
        Preset(device=V100, intra=NVLINK2, inter=EDR, **_BOX),
        Preset(device=H100, intra=NVLINK4, inter=NDR, **_BOX),
        Preset(device=H800, intra=NVLINK_800, inter=NDR, **_BOX),
        Preset(device=H200, intra=NVLINK4, inter=NDR, **_BOX),
        Preset(device=B200, intra=NVLINK5, inter=NDR, **_BOX),
        Preset(device=B300, intra=NVLINK5, inter=XDR, **_BOX),
        Preset(device=GB200, intra=NVLINK5, inter=NDR, domain=72, tray=4),
        Preset(device=GB300, intra=NVLINK5, inter=XDR, domain=72, tray=4),
        Preset(device=CPU, intra=LOOPBACK, inter=LOOPBACK, domain=10**6, tray=1),  # one machine, however many
    )
}
