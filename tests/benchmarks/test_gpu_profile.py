"""Times of kernels by class: each moment counts once, and communication only where nothing else runs."""

from __future__ import annotations

import pytest

from benchmarks.gpu_profile import KernelRun, class_of, idle_before, milliseconds


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "communication"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTN", "products"),
        (
            "void cutlass::device_kernel<enable_3x_kernel<GroupProblemShape",
            "products of experts",
        ),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>", "attention"),
        ("triton_poi_fused_mul_silu_0", "compiled memory-bound"),
        ("Memset (Device)", "copies and zeros"),
        ("void at::native::unrolled_elementwise_kernel<>", "other"),
    ],
)
def test_class_of_a_kernel(name: str, title: str) -> None:
    assert class_of(name) == title


def test_each_moment_counts_once() -> None:
    runs = [
        KernelRun("nvjet", 0, 2000),
        KernelRun("triton", 1000, 3000),  # half of it beside the product
        KernelRun("nccl", 500, 4000),  # 1 ms of it beside nothing
        KernelRun("nccl", 3500, 5000),
    ]
    assert milliseconds(runs) == {"products": 2.0, "compiled memory-bound": 1.0, "communication": 2.0}


def test_idle_time_counts_before_the_kernel_that_ends_it() -> None:
    runs = [
        KernelRun("a", 0, 1000),
        KernelRun("nccl", 500, 3000),
        KernelRun("b", 2000, 2500),
        KernelRun("a", 3500, 4000),
    ]
    assert idle_before(runs) == {"a": [0.5]}
    assert not idle_before([])
