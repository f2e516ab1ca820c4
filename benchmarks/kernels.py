"""Compare predicted and measured kernels on this GPU: `python benchmarks/kernels.py [FILE]`.

Each case is one piece of work of a model's layer: its forward pass, and its gradients where they are other kernels. A
CUDA graph repeats it, so that no launch is measured, in bursts short enough for the full clock. Host time is measured
separately. FILE receives every figure as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from attrs import asdict, evolve, frozen
from torch import Tensor

from megaloom.dsl.facts.work import Work
from megaloom.dsl.work_kinds import WorkKind
from megaloom.planner import Precision, cluster
from megaloom.planner.contract.devices import Device
from megaloom.planner.cost import kernels
from megaloom.planner.cost.profiles.frameworks import OWN
from megaloom.runtime.launch import launcher
from megaloom.runtime.megatron import device

WINDOW, ROUNDS = 0.03, 3  # seconds of one round of a case, rounds; the best round counts
BF16 = torch.bfloat16
TOKENS = (2048, 8192, 16384)
COLUMNS = (  # n, k of the matrix products of layers
    *((1536, 512), (2048, 512), (512, 2048)),
    *((2304, 768), (3072, 768), (768, 3072), (50304, 768)),  # GPT-2
    *((3072, 2048), (2048, 2048), (512, 2048), (16384, 2048), (2048, 8192), (128256, 2048)),  # Llama 3.2 1B
    *((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),  # Llama 3 8B
    *((1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584)),  # Llama 3 70B, tp 8
    *((2304, 16384), (13312, 16384), (16384, 6656)),  # Llama 3 405B, tp 8
    *((4608, 12288), (12288, 1536), (6144, 12288)),  # GPT-3 175B, tp 8
    *((1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384)),  # DeepSeek-V3's latent attention
)
SQUARES = (1024, 2048, 4096, 8192, 16384)
FEW = (64, 256, 1024)  # tokens per expert
EXPERTS = ((1536, 2048), (2048, 768), (28672, 4096), (4096, 14336), (4096, 7168), (7168, 2048))
GROUPED = ((128, 128, 1536, 2048), (128, 512, 2048, 768), (8, 1024, 28672, 4096), (32, 512, 4096, 7168))
# Query heads, key heads, channels, causal; 16,384 tokens in sequences of each length.
HEADS = ((32, 32, 128, True), (32, 8, 128, True), (32, 8, 64, True), (12, 12, 64, True), (16, 16, 128, False))
SEQUENCES = (512, 1024, 2048, 4096, 8192, 16384)


@frozen
class Measured:
    """Predicted and measured seconds of one pass of a piece of work."""

    kind: str
    what: str
    seconds: float
    predicted: float
    flops: int
    nbytes: int


def busy(run: Callable[[], Any]) -> float:
    """Return GPU seconds of one call among many, on a side stream: a graph cannot record the default one."""
    for _ in range(2):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    count = max(1, min(50, int(WINDOW / (begin.elapsed_time(end) / 1e3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(count):
            run()
    took = []
    for _ in range(ROUNDS):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        took.append(begin.elapsed_time(end) / 1e3 / count)
    return min(took)


def waited(run: Callable[[], Any], count: int = 2000) -> float:
    """Return seconds of one call among many, with host time."""
    run()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(count):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / count


def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def work(kind: WorkKind, flops: int, elements: int, *, count: int = 1, m: int = 0, n: int = 0, k: int = 0) -> Work:
    """Return a piece of work as the facts count it; each gradient of a matrix product has the FLOPs of the product."""
    return Work(kind, "", flops, flops, flops, elements, count=count, m=m, n=n, k=k)


def products(on: Device) -> Iterator[Measured]:
    """Yield y = x w, dx = dy w', and dw = x' dy, which accumulates in 16 bits."""
    shapes = [("square", n, n, n) for n in SQUARES]
    shapes += [("layer", m, n, k) for m in TOKENS for n, k in COLUMNS]
    shapes += [("expert", m, n, k) for m in FEW for n, k in EXPERTS]
    shapes += [("misaligned", 8192, 50257, 768)]
    for kind, m, n, k in shapes:
        x, w, dy = random(m, k), random(n, k), random(m, n)
        of = work(WorkKind.PRODUCT, 2 * m * n * k, m * k + k * n + m * n, m=m, n=n, k=k)
        took = kernels.kernel_seconds(of, on, Precision.BF16)
        parts = parted(of, on)
        out = x.new_empty(m, n), torch.empty_like(x), torch.empty_like(w)
        runs = {
            "y": (lambda a=x, b=w, o=out[0]: torch.mm(a, b.T, out=o)),
            "dx": (lambda a=dy, b=w, o=out[1]: torch.mm(a, b, out=o)),
            "dw": (lambda a=dy, b=x, o=out[2]: torch.mm(a.T, b, out=o)),
        }
        predicted = dict(zip(runs, (took.forward, *parts), strict=True))
        for name, run in runs.items():
            yield Measured(f"{kind} {name}", f"{m} x {n} x {k}", busy(run), predicted[name], of.flops, 2 * of.elements)


def parted(of: Work, on: Device) -> tuple[float, float]:
    """Return the predicted seconds of the two products of the backward pass."""
    return tuple(  # type: ignore[return-value]
        kernels.kernel_seconds(evolve(of, dgrad=dgrad, wgrad=wgrad), on, Precision.BF16).backward
        for dgrad, wgrad in ((of.dgrad, 0), (0, of.wgrad))
    )


def grouped(on: Device) -> Iterator[Measured]:
    """Yield the matrix products of many experts as torch's grouped GEMM."""
    for count, m, n, k in GROUPED:
        x, w, dy = random(count * m, k), random(count, n, k), random(count * m, n)
        ends = torch.arange(m, count * m + 1, m, device="cuda", dtype=torch.int32)
        of = work(WorkKind.PRODUCT, 2 * count * m * n * k, count * (m * k + k * n + m * n), count=count, m=m, n=n, k=k)
        took = kernels.kernel_seconds(of, on, Precision.BF16).forward
        runs = {
            "y": (lambda a=x, b=w, e=ends: torch._grouped_mm(a, b.transpose(1, 2), offs=e)),
            "dx": (lambda a=dy, b=w, e=ends: torch._grouped_mm(a, b, offs=e)),
            "dw": (lambda a=dy, b=x, e=ends: torch._grouped_mm(a.T, b, offs=e)),
        }
        for name, run in runs.items():
            what = f"{count} x {m} x {n} x {k}"
            yield Measured(f"grouped {name}", what, busy(run), took, of.flops, 2 * of.elements)


def attention(on: Device) -> Iterator[Measured]:
    """Yield attention with the kernel that torch chooses."""
    for heads, few, channels, causal in HEADS:
        for seq in SEQUENCES:
            batch = max(SEQUENCES) // seq
            q = random(batch, heads, seq, channels).requires_grad_()
            k, v = (random(batch, few, seq, channels).requires_grad_() for _ in range(2))
            dy = random(batch, heads, seq, channels)
            flops = 4 * batch * heads * seq * seq * channels // (2 if causal else 1)
            of = work(
                WorkKind.ATTENTION, flops, 2 * (q.numel() + k.numel()), count=batch * heads, m=seq, n=seq, k=channels
            )
            took = kernels.kernel_seconds(of, on, Precision.BF16)

            def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v, causal: bool = causal, few: int = few) -> Tensor:
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=few != q.shape[1])

            name = f"{'causal' if causal else 'whole'} {heads}/{few} x {channels}"
            with torch.no_grad():
                seconds = busy(forward)
            yield Measured(f"attention {name}", f"{batch} x {seq}", seconds, took.forward, flops, 2 * of.elements)
            y = forward()
            seconds = busy(lambda y=y, q=q, k=k, v=v, dy=dy: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True))
            expected, done = took.backward, int(flops * kernels.ATTEND_BACKWARD)
            yield Measured(f"attention back {name}", f"{batch} x {seq}", seconds, expected, done, 3 * of.elements)


def chains(on: Device) -> Iterator[Measured]:
    """Yield memory-bound kernels as the runtime computes them."""
    for tokens, width in ((4096, 768), (16384, 768), (4096, 2048), (16384, 2048), (4096, 8192), (16384, 8192)):
        for name, kind, elements, run, leaves in layers(tokens, width):
            of = evolve(work(WorkKind(kind), 0, elements), fusion="gate" if name == "swiglu" else None)
            took = kernels.kernel_seconds(of, on, Precision.BF16)
            with torch.no_grad():
                seconds = busy(run)
            what = f"{tokens} x {width}"
            yield Measured(name, what, seconds, took.forward, 0, 2 * elements)
            if leaves:
                y = run()
                seconds = busy(partial(torch.autograd.grad, y, leaves, torch.randn_like(y), retain_graph=True))
                yield Measured(f"{name} back", what, seconds, took.backward, 0, 3 * elements)


Case = tuple[str, str, int, Callable[[], Tensor], tuple[Tensor, ...]]  # name, kind, elements, what, with gradients of


def layers(tokens: int, width: int) -> tuple[Case, ...]:
    from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    from megaloom.runtime.modules.fused import apply_rope

    n = tokens * width
    x, other = (random(tokens, 1, width).requires_grad_() for _ in range(2))
    wide, heads = random(tokens, 1, 2 * width).requires_grad_(), random(tokens, 1, width // 64, 64).requires_grad_()
    scale, shift = (random(width).requires_grad_() for _ in range(2))
    angles = random(tokens, 1, 1, 32, dtype=torch.float32).repeat(1, 1, 1, 2)
    return (
        ("rms norm", "normalize", 2 * n, lambda: F.rms_norm(x, scale.shape, scale), (x, scale)),
        ("layer norm", "normalize", 2 * n, lambda: F.layer_norm(x, scale.shape, scale, shift), (x, scale, shift)),
        ("swiglu", "pointwise", 3 * n, lambda: bias_swiglu_impl(wide, None), (wide,)),
        ("bias gelu", "pointwise", 2 * n, lambda: bias_gelu_impl(x, shift), (x, shift)),
        ("rope", "rope", 2 * n, lambda: apply_rope(heads, angles), (heads,)),
        ("add", "pointwise", 3 * n, lambda: x + other, ()),
        ("dropout", "drop", 2 * n, lambda: F.dropout(x, 0.1), (x,)),
    )


def beside(on: Device) -> Iterator[Measured]:
    """Yield loss, addition of a gradient, and optimizer step, whose bytes the cost model counts per element."""
    from megatron.core import parallel_state

    from megaloom.runtime.megatron.fused_loss import cross_entropy

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    group = parallel_state.get_tensor_model_parallel_group()
    for tokens, vocab in ((4096, 32000), (4096, 128256)):
        logits, labels = random(tokens, 1, vocab).requires_grad_(), torch.randint(vocab, (tokens, 1), device="cuda")
        moved = OWN.kernels.loss_moved_nbytes * logits.numel()

        def loss(logits: Tensor = logits, labels: Tensor = labels) -> tuple[Tensor, ...]:
            return torch.autograd.grad(cross_entropy(logits, labels, group).sum(), logits)

        yield Measured("loss", f"{tokens} x {vocab}", waited(loss, 10), moved / on.moves, 0, moved)
    for n in (2**22, 2**26, 2**28):
        main, gradient = random(n, dtype=torch.float32), random(n)
        moved = 10 * n
        predicted = OWN.kernels.memory_passes["gradient"][1] * moved / on.moves
        yield Measured("gradient", f"{n}", busy(partial(main.add_, gradient)), predicted, 0, moved)
    for n, pieces in ((2**28, 16), (2**28, 256), (2**26, 256)):
        weights = [random(n // pieces, dtype=torch.float32).requires_grad_() for _ in range(pieces)]
        for x in weights:
            x.grad = torch.ones_like(x)
        step = torch.optim.AdamW(weights, lr=1e-4).step
        moved = (OWN.optimizer.step_moved_nbytes - 12) * n  # without norm and scaling of the gradient
        yield Measured("adamw", f"{pieces} of {n // pieces}", waited(step, 5), moved / on.moves, 0, moved)


def host(on: Device) -> Iterator[Measured]:
    """Yield kernels that end before the host launches the next one: host time and GPU time of each."""
    x, y = (torch.ones(8, 64, device="cuda") for _ in range(2))

    w = random(64, 64)
    z = random(8, 64)
    yield Measured("host", "add into", waited(lambda: torch.add(x, y, out=x)), on.launch_seconds, 0, 0)
    yield Measured("host", "product", waited(lambda: torch.mm(z, w)), on.launch_seconds, 0, 0)
    yield Measured("host", "norm", waited(lambda: F.layer_norm(x, (64,))), on.launch_seconds, 0, 0)
    yield Measured("graph", "add into", busy(lambda: torch.add(x, y, out=x)), on.launch_seconds, 0, 0)
    yield Measured("graph", "product", busy(lambda: torch.mm(z, w)), on.launch_seconds, 0, 0)


def text_line(row: Measured) -> str:
    """Return a case as a line of text: microseconds, and FLOP/s or bytes/s."""
    rate = (
        f"{row.flops / row.seconds / 1e12:8.0f} TFLOP/s"
        if row.flops
        else f"{row.nbytes / row.seconds / 1e9:8.0f} GB/s   "
    )
    off = row.predicted / row.seconds - 1
    return f"{row.kind:<34}{row.what:<26}{1e6 * row.seconds:>10.1f}{1e6 * row.predicted:>10.1f}{off:>+8.0%}{rate}"


def totals(rows: Iterable[Measured]) -> Iterator[str]:
    """Return a line for each kind of case: median error, bias, worst error."""
    kinds: dict[str, list[Measured]] = {}
    for row in rows:
        kinds.setdefault(row.kind, []).append(row)
    for kind, cases in kinds.items():
        errors = [row.predicted / row.seconds - 1 for row in cases]
        worst = max(cases, key=lambda row: abs(row.predicted / row.seconds - 1))
        yield (
            f"{kind:<34}{len(cases):>4}{median(map(abs, errors)):>8.1%}{median(errors):>+8.1%}"
            f"{worst.predicted / worst.seconds - 1:>+8.0%}  {worst.what}"
        )


def measured(on: Device) -> list[Measured]:
    """Measure every case on the GPU of this rank."""
    out = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for cases in (products, attention, chains, beside, grouped, host):
            for row in cases(on):
                out.append(row)
                print(text_line(row), flush=True)
            torch.cuda.empty_cache()
    return out


def main() -> None:
    if not device.gpu_count():
        sys.exit("benchmarks/kernels.py measures GPU kernels, and this machine has no GPU")
    kind = device.local_cluster().partition("x")[2]
    on = evolve(cluster(f"1x{kind}").device, sustained=1.0)
    print(f"{'':<34}{'':<26}{'us':>10}{'planned':>10}{'off':>8}")
    (rows,) = launcher.run(measured, (on,), 1)
    print(f"\n{'':<34}{'':>4}{'median':>8}{'bias':>8}{'worst':>8}")
    print("\n".join(totals(rows)))
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps([asdict(row) for row in rows], indent=0))


if __name__ == "__main__":
    main()
