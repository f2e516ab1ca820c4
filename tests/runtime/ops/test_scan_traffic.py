"""Bytes that kernels move by torch's dispatcher, against the counts of the cost model: of a scan, of a quotient."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megaloom.dsl import Dim, Input, Shape, Value, graph, model
from megaloom.dsl.facts.primitives import program, separate_ops
from megaloom.dsl.facts.separate_ops import traffic
from megaloom.planner.contract.capability import SCAN_CHUNK, ScanKernel
from megaloom.planner.cost.core_kernels import SCAN_TRAFFIC
from megaloom.runtime.ops.chunked_scan import scan_chunks

BATCH, CHUNKS, HEADS, CHANNELS, GROUPS, STATE = 2, 4, 12, 40, 2, 48


class Traffic(TorchDispatchMode):
    """Bytes read and written by kernels other than matrix products. Views move nothing."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        if not view and func not in (torch.ops.aten.bmm.default, torch.ops.aten._unsafe_view.default):
            tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
            self.nbytes += sum(prod(t.shape) * t.element_size() for t in tensors)
        return out


def test_bytes_of_a_scan() -> None:
    sizes = (HEADS, CHANNELS), (HEADS,), (GROUPS, STATE), (GROUPS, STATE)
    x, dt, b, c = (torch.randn(BATCH, CHUNKS, SCAN_CHUNK, *s, dtype=torch.bfloat16, requires_grad=True) for s in sizes)
    a = torch.zeros(HEADS, dtype=torch.bfloat16, requires_grad=True)
    with Traffic() as forward:
        decay = (dt.float() * a.float()).cumsum(2)
        y = scan_chunks(x, dt, decay, decay[:, :, -1].cumsum(1), b, c)
    with Traffic() as backward:
        torch.autograd.grad(y, (x, dt, a, b, c), torch.ones_like(y))
    positions = BATCH * CHUNKS * SCAN_CHUNK * HEADS
    counts = SCAN_TRAFFIC[ScanKernel.CHUNKS]
    for i, measured in enumerate((forward.nbytes, backward.nbytes)):
        passes = counts.pair_passes[i] * SCAN_CHUNK + counts.x_passes[i] * CHANNELS + counts.head_passes[i]
        passes += counts.state_passes[i] * CHANNELS * STATE / SCAN_CHUNK
        wide = counts.pair_fp32_nbytes[i] * SCAN_CHUNK + counts.head_fp32_nbytes[i]
        assert positions * (wide + 2 * passes) == pytest.approx(measured, rel=0.05)


def test_bytes_of_a_quotient() -> None:
    dims = Dim("rows", 8), Dim("columns", 16)
    dividend, divisor = (Value(Input(name), (), Shape(d)) for name, d in (("x", dims), ("y", dims[:1])))
    p = separate_ops(program(graph(model("m", dividend / divisor)).nodes[-1]))
    (step,) = (step for step in p.steps if step.value.args)
    counted, _ = traffic(p, step, lambda v: prod(d.known for d in v.shape))
    x, y = torch.rand(8, 16, requires_grad=True), torch.ones(8, 1, requires_grad=True)
    with Traffic() as forward:
        z = x / y
    gradient = torch.ones_like(z)
    with Traffic() as backward:
        torch.autograd.grad(z, (x, y), gradient)
    copies = 2 * z.numel()  # between orders of dims, around the node
    assert [4 * (n - copies) for n in (counted.forward, counted.backward)] == [forward.nbytes, backward.nbytes]
