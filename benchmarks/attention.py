"""Attention kernels of bodies on this GPU: their error against the plain formula, their speed and their memory.

`python -m benchmarks.attention` prints one line for each kind of attention: the largest error of the result and of each
gradient in fp32, relative to the largest number; then of a long sequence in bf16 the milliseconds and TFLOP/s of a
forward and a backward pass, and the memory beside the arguments. It fails if an error exceeds 1e-4. It needs a GPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from megaloom.dsl import Attend, Dim, DType, Input, RelativeBuckets, Shape, Sizes, Value, apply
from megaloom.planner.contract.attention_blocks import local_ranges
from megaloom.planner.contract.capability import AttentionKernel
from megaloom.runtime.ops import whole
from megaloom.runtime.ops.attention_kernels import LocalQueries, attend

OPS = {
    "causal": Attend(),
    "latent": Attend(scale=0.07),
    "window 128": Attend(window=128),
    "window 4096": Attend(window=4096),
    "soft cap": Attend(softcap=50.0),
    "soft cap, window 4096": Attend(softcap=50.0, window=4096),
    "ALiBi": Attend(alibi=True),
    "sinks": Attend(sink=True),
    "sinks, window 128": Attend(sink=True, window=128),
    "relative": Attend(relative=RelativeBuckets(32, 128), causal=False),
}
ALLOWED = 1e-4
SHORT, LONG, HEADS, KV_HEADS, CHANNELS = 512, 8192, 32, 8, 128
Sample = tuple[Value, list[Tensor]]


def sample(name: str, seq: int, heads: int, dtype: torch.dtype) -> Sample:
    """Return attention as a value, and random arguments for it."""
    op, latent = OPS[name], name == "latent"
    batch, s, h = Dim("batch", 1), Dim("seq", seq), Dim("heads", heads)
    g = Dim("kv_heads", heads if latent else heads * KV_HEADS // HEADS)
    c, d = Dim("head_dim", 192 if latent else CHANNELS), Dim("head_dim", CHANNELS)
    shapes: list[tuple[Dim, ...]] = [(batch, s, h, c), (batch, s, g, c), (batch, s, g, d), *([(h,)] * op.sink)]
    if op.relative is not None:
        shapes.append((Dim("buckets", op.relative.buckets), h))
    inputs = (Value(Input(str(i)), (), Shape(dims), dtype=DType.COMPUTE) for i, dims in enumerate(shapes))
    torch.manual_seed(0)
    args = [torch.randn([x.known for x in dims], device="cuda", dtype=dtype) for dims in shapes]
    return apply(op, *inputs), [x.requires_grad_() for x in args]


def kernel_of(name: str) -> AttentionKernel:
    """Return the kernel that GPUs use."""
    return AttentionKernel.TORCH if name in ("causal", "latent") else AttentionKernel.FLEX


def error(name: str, cp: int) -> float:
    """Return the largest error of the results and gradients of all context-parallel ranks."""
    out, args = sample(name, SHORT, HEADS // 4, torch.float32)
    expected = whole(out.op, out, *args)
    weights = torch.linspace(-1, 1, expected.numel(), device="cuda").view_as(expected)
    found = torch.zeros_like(expected)
    for rank in range(cp):
        ranges = local_ranges(SHORT // cp, cp, rank)
        rows = torch.cat([torch.arange(SHORT)[at.start : at.stop] for at in ranges]).cuda()
        part = attend(kernel_of(name), out, args[0][:, rows], *args[1:], local=LocalQueries(ranges, 0, HEADS // 4))
        found = found.index_copy(1, rows, part)
    pairs = [(found, expected)]
    pairs += zip(*(torch.autograd.grad((y * weights).sum(), args) for y in (found, expected)), strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def speed(name: str) -> str:
    """Return time, TFLOP/s and memory of a long sequence, forward and backward."""
    out, args = sample(name, LONG, HEADS, torch.bfloat16)
    local = LocalQueries((range(LONG),), 0, HEADS)
    gradient = torch.randn([d.known for d in out.shape], device="cuda", dtype=torch.bfloat16)

    def run() -> object:
        return torch.autograd.grad(attend(kernel_of(name), out, *args, local=local), args, gradient)

    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    milliseconds = timed(run)
    flops = 3.5 * out.op.flops(out.shape, tuple(a.shape for a in out.args), Sizes(batch=1, seq=LONG, source=LONG))
    peak = (torch.cuda.max_memory_allocated() - held) / 2**20
    return f"{milliseconds:6.2f} ms {flops / milliseconds / 1e9:5.0f} TFLOP/s {peak:6.0f} MiB, first {first:4.1f} s"


def timed(run: Callable[[], object], times: int = 10) -> float:
    """Return the mean milliseconds of a call."""
    for _ in range(3):
        run()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / times


def main() -> int:
    """Print one line for each kind of attention; return 1 if one of them is wrong."""
    torch.backends.cuda.matmul.allow_tf32 = False
    wrong = False
    for name in OPS:
        errors = [error(name, cp) for cp in (1, 2)]
        wrong |= max(errors) > ALLOWED
        print(f"{name:22s} error {errors[0]:.1e}, cp 2 {errors[1]:.1e} | {speed(name)}", flush=True)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
