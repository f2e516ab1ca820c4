"""The kernels of bodies compute what the plain formulas compute, forward and backward, and store no scores."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megaloom.dsl import Attend, Dim, DType, Input, RelativeBuckets, Scan, Shape, Value, apply, documents
from megaloom.planner.contract import attention_blocks, capability
from megaloom.planner.contract.attention_blocks import local_ranges
from megaloom.planner.contract.capability import AttentionKernel
from megaloom.runtime.ops import whole
from megaloom.runtime.ops.attention_kernels import LocalQueries, attend
from megaloom.runtime.ops.chunked_scan import chunked_scan

BATCH, SEQ, HEADS, CHANNELS = 2, 24, 6, 8
OPS = {
    "causal": Attend(),
    "not causal": Attend(causal=False, scale=0.2),
    "window": Attend(window=5),
    "window of one": Attend(window=1),
    "soft cap": Attend(softcap=3.0, window=7),
    "ALiBi": Attend(alibi=True),
    "ALiBi, not causal": Attend(alibi=True, causal=False),
    "sinks": Attend(sink=True, window=5),
    "relative": Attend(relative=RelativeBuckets(8, 16), causal=False),
    "documents": Attend(documents=True),
    "documents, not causal": Attend(documents=True, causal=False),
    "documents, window, sinks": Attend(documents=True, window=5, sink=True),
    "all": Attend(sink=True, relative=RelativeBuckets(8, 16, False), alibi=True, softcap=4.0, window=9, scale=0.5),
}
PLAIN = ("causal", "not causal")


def tensor(name: str, *dims: Dim) -> Value:
    """An input of these dims."""
    return Value(Input(name), (), Shape(dims), dtype=DType.COMPUTE)


def attention(op: Attend, kv_heads: int, v_channels: int, source: bool = False) -> tuple[Value, list[Tensor]]:
    """Attention as a value, and random arguments for it."""
    batch, seq, h, g = Dim("batch", BATCH), Dim("seq", SEQ), Dim("heads", HEADS), Dim("kv_heads", kv_heads)
    keys = Dim("source", 10) if source else seq
    c, d = Dim("head_dim", CHANNELS), Dim("head_dim", v_channels)
    shapes = [(batch, seq, h, c), (batch, keys, g, c), (batch, keys, g, d)]
    shapes += [(h,)] * op.sink + ([] if op.relative is None else [(Dim("buckets", 8), h)])
    indices = [documents(str(i), d) for i, d in enumerate((seq, keys)) if op.documents]
    out = apply(op, *(tensor(str(i), *shape) for i, shape in enumerate(shapes)), *indices)
    torch.manual_seed(0)
    args = [torch.randn([x.known for x in shape]).requires_grad_() for shape in shapes]
    own = [torch.randint(3, (BATCH, d.known)).cumsum(1) // 4 for d in (seq, keys) if op.documents]
    return out, [*args, *(own[:1] * 2 if keys is seq else own)]


def parameters(args: list[Tensor]) -> list[Tensor]:
    """The arguments that have gradients: all but document indices."""
    return [x for x in args if x.requires_grad]


def gradients(y: Tensor, args: list[Tensor]) -> list[Tensor]:
    """The result, and the gradients of a sum that weighs each element differently."""
    weights = torch.linspace(-1, 1, y.numel()).view_as(y)
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), parameters(args))]


def saved_elements(run: Callable[[], object]) -> list[int]:
    """The elements of each storage that autograd saves."""
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return [t.untyped_storage().nbytes() // t.element_size() for t in kept.values()]


@pytest.mark.parametrize("block", [1, 300, 2**25])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("name", OPS)
def test_attention_by_blocks(name: str, kv_heads: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_blocks, "SCORES_PER_BLOCK", block)
    out, args = attention(OPS[name], kv_heads, 5)
    local = LocalQueries((range(SEQ),), 0, HEADS)
    found = gradients(attend(AttentionKernel.BLOCKS, out, *args, local=local), args)
    for a, b in zip(found, gradients(whole(out.op, out, *args), args), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", [AttentionKernel.BLOCKS, AttentionKernel.TORCH])
@pytest.mark.parametrize("name", OPS)
def test_shards_of_queries_and_heads(name: str, kernel: AttentionKernel) -> None:
    """Two context-parallel ranks have two ranges of queries each, two tensor-parallel ranks half the heads."""
    op = OPS[name]
    if kernel is AttentionKernel.TORCH and name not in PLAIN:
        return
    out, args = attention(op, HEADS, CHANNELS)
    expected, pieces = whole(out.op, out, *args), []
    for rank in (0, 1):
        ranges = local_ranges(SEQ // 2, 2, rank)
        rows = torch.cat([torch.arange(SEQ)[at.start : at.stop] for at in ranges])
        for first in (0, HEADS // 2):
            heads = slice(first, first + HEADS // 2)
            (q, k, v, *others), indices = parameters(args), args[-2:] if op.documents else []
            part = [q[:, rows, heads], k[:, :, heads], v[:, :, heads], *(x[..., heads] for x in others)]
            part += [x[:, at] for x, at in zip(indices, (rows, slice(None)), strict=False)]
            found = attend(kernel, out, *part, local=LocalQueries(ranges, first, HEADS))
            pieces.append((found, expected[:, rows, heads]))
    for found, want in pieces:
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
    a = torch.autograd.grad(sum(x.square().sum() for x, _ in pieces), parameters(args), retain_graph=True)
    b = torch.autograd.grad(expected.square().sum(), parameters(args))
    for mine, theirs in zip(a, b, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_attention_to_other_positions() -> None:
    out, args = attention(Attend(causal=False), 2, 5, source=True)
    local = LocalQueries((range(SEQ),), 0, HEADS)
    for kernel in (AttentionKernel.BLOCKS, AttentionKernel.TORCH):
        found = gradients(attend(kernel, out, *args, local=local), args)
        for a, b in zip(found, gradients(whole(out.op, out, *args), args), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OPS)
def test_attention_saves_no_scores(name: str) -> None:
    """The arguments, each once, by the kernel that has scores at all; and by torch's the output and one sum a row."""
    local = LocalQueries((range(SEQ),), 0, HEADS)
    out, args = attention(OPS[name], 2, CHANNELS)
    kept = saved_elements(lambda: attend(AttentionKernel.BLOCKS, out, *args, local=local))
    assert sorted(kept) == sorted(x.numel() for x in parameters(args))
    if name in PLAIN:
        rows = BATCH * SEQ * HEADS
        kept = saved_elements(lambda: attend(AttentionKernel.TORCH, out, *args, local=local))
        assert sorted(kept) == sorted([*(x.numel() for x in args), rows * CHANNELS, rows])


@pytest.mark.filterwarnings("ignore")  # FlexAttention says on CPUs that it stores scores there
@pytest.mark.parametrize("name", sorted(set(OPS) - set(PLAIN)))
def test_flex_attention_forward(name: str) -> None:
    """On CPUs it has no backward pass; benchmarks/attention.py compares gradients on a GPU."""
    out, args = attention(OPS[name], 2, CHANNELS)
    expected = whole(out.op, out, *args)
    with torch.no_grad():
        for ranges in ((range(SEQ),), *(local_ranges(SEQ // 2, 2, rank) for rank in (0, 1))):
            rows = torch.cat([torch.arange(SEQ)[at.start : at.stop] for at in ranges])
            part = [args[0][:, rows].detach(), *(x.detach() for x in args[1:])]
            if out.op.documents:
                part[-2] = part[-2][:, rows]
            found = attend(AttentionKernel.FLEX, out, *part, local=LocalQueries(ranges, 0, HEADS))
            torch.testing.assert_close(found, expected[:, rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 5, 8, 64])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_scan_in_chunks(groups: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "SCAN_CHUNK", chunk)
    batch, seq, h, g, p, n = (
        Dim(*x)
        for x in (("batch", BATCH), ("seq", SEQ), ("heads", HEADS), ("groups", groups), ("head_dim", 8), ("state", 4))
    )
    shapes = [(batch, seq, h, p), (batch, seq, h), (h,), (batch, seq, g, n), (batch, seq, g, n)]
    out = apply(Scan(), *(tensor(str(i), *shape) for i, shape in enumerate(shapes)))
    torch.manual_seed(0)
    x, dt, a, b, c = (torch.randn([d.known for d in shape]) for shape in shapes)
    args = [t.requires_grad_() for t in (x, dt.abs(), -a.abs(), b, c)]
    found = gradients(chunked_scan(out, *args), args)
    for mine, theirs in zip(found, gradients(whole(out.op, out, *args), args), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
