"""Presets of devices and links. Each figure has its source beside it."""

from __future__ import annotations

from attrs import evolve

from megaloom.planner.contract.devices import (
    MEMORY,
    Device,
    GiB,
    Link,
    Preset,
)

# The buffers of one NCCL communicator of more than two devices, on four A100 (github.com/NVIDIA/nccl/issues/964).
NCCL_GROUP = 688 * 10**6
# Those of an all-to-all for each pair: eight H100 of a node went from 1.06 to 4.34 GB, in pieces of 10 MiB for each of
# up to 32 channels (github.com/NVIDIA/nccl/issues/1685).
NCCL_PEER = int((4.34e9 - 1.06e9) / 7)


# Latency, and the hops of the links below: NCCL's own tuning table for the ring (src/graph/tuning.cc: base 8.4 us,
# NVLink 3.4 us, network 14 us). It gives 25 us for an all-reduce over four H200 that took 25, and 15 us for
# an all-gather that took 17.
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


# NVLink, one way, from the datasheets of the GPUs (which print the sum of both ways). Of it, 0.755 is the mean of
# all-reduce, all-gather, reduce-scatter, all-to-all and a ring of sends of 1 GiB over four H200, measured for this
# project (354, 326, 322, 337, 360 GB/s of 450); NVIDIA says 370 (github.com/NVIDIA/nccl-tests/issues/212). Taken to be
# the same share for the other generations and PCIe, which were not measured.
NVLINK2, NVLINK3, NVLINK4, NVLINK5 = (
    _link(f"NVLink {n}", bandwidth, 3.4e-6, 0.755) for n, bandwidth in ((2, 150e9), (3, 300e9), (4, 450e9), (5, 900e9))
)
NVLINK_800 = evolve(NVLINK4, bandwidth=200e9)  # of the A800 and the H800
PCIE4 = _link("PCIe 4", 31.5e9, 6e-6, 0.755)  # its hop is a guess
# One network card a GPU. Of 50 GB/s NCCL gets 46 to 48 (github.com/NVIDIA/nccl-tests/issues/290). DGX A100: 200 Gb/s a
# GPU; DGX H100, B200, NVL72: 400; those with a 300: 800; DGX-1 with V100: four cards of 100 for 8.
EDR, HDR, NDR, XDR = (
    _link(f"InfiniBand {name}", bandwidth, 14e-6, 0.92)
    for name, bandwidth in (("EDR", 6.25e9), ("HDR", 25e9), ("NDR", 50e9), ("XDR", 100e9))
)

# What an eager torch kernel costs the host: `megaloom measure` on two H200s. A CUDA graph would hide it.
LAUNCH = 14e-6

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
#   TFLOP/s), matrix products run at 680 TFLOP/s where alone they reach 790, of which their shapes explain 3 to 4 %. An
#   A100 keeps its clock. Blackwell's depend on the power that the box gives each GPU: 1,000 W (B200), 1,200 W (GB200),
#   1,100 W (B300), 1,400 W (GB300); fitted to dense runs of one half of the published models, of two to five sources
#   for each device (`megaloom validate`). All of these are of a chip in the middle, see `device.VARIATION`.
# - nvfp4_efficiency: fitted likewise: its peak is half as much again as that of GB200, and its steps no quicker for it.
# - context_nbytes: on an H200 0.51 GiB for the context, 0.68 once products, attention and norms have run, and 0.35 more
#   for NCCL beside its communicators, measured for this project by what torch does not reserve; more than 1 GB before
#   CUDA 11.7, which loaded all kernels (github.com/pytorch/pytorch/issues/107667).
# - library_nbytes: torch gives cuBLAS 4 MiB twice and 16 KiB eight times, from Hopper on 32 MiB (aten, CUDABlas.cpp:
#   getChosenWorkspaceSize).
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
# Over PCIe 4, 16 lanes: 31.5 GB/s one way; and less power (300 W).
A100_PCIE = evolve(A100, name="A100-PCIe", nbytes=MEMORY["A100-PCIe"], bandwidth=1.935e12, sustained=0.85)
A100_PCIE_40 = evolve(A100_PCIE, name="A100-PCIe-40GB", nbytes=MEMORY["A100-PCIe-40GB"], bandwidth=1.555e12)  # 250 W
V100 = evolve(  # SXM2, 32 GB
    A100, name="V100", flops={"fp16": 125e12, "fp32": 15.7e12}, nbytes=MEMORY["V100"], bandwidth=0.9e12, units=80
)
A100_40 = evolve(A100, name="A100-40GB", nbytes=MEMORY["A100-40GB"], bandwidth=1.555e12)
A800 = evolve(A100, name="A800", nbytes=MEMORY["A800"])
H800 = evolve(H100, name="H800", nbytes=MEMORY["H800"])
H200 = evolve(H100, name="H200", nbytes=MEMORY["H200"], bandwidth=4.8e12)
# NVL72, 1,200 W: 180 PFLOP/s dense bf16, 5.76 PFLOP/s fp32, 576 TB/s in a rack of 72.
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
