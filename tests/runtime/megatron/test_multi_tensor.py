"""Norms, scaling and copies of many tensors equal those of megatron-core's loops."""

import torch

from megaloom.runtime.launch import launcher
from tests.support.limits import LIMIT

SHAPES = (3, 5), (7,), (), (2, 2, 2)


def test_foreach_kernels_compute_what_the_loops_do() -> None:
    assert launcher.run(_compare, (), 1, timeout=LIMIT) == [[]]


def _compare() -> list[str]:
    """Return the functions whose results differ."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, optimizer

    from megaloom.runtime.megatron.multi_tensor import use_foreach_kernels

    chunk, overflow = 2048, torch.zeros(1, dtype=torch.int)
    loop_norm, loop_scale = clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl
    loop_copy = optimizer._multi_tensor_copy_this_to_that
    assert (loop_norm, loop_scale) == (utils.local_multi_tensor_l2_norm, utils.local_multi_tensor_scale)
    use_foreach_kernels()
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(shape, generator=generator) for shape in SHAPES]
    wrong = []
    norms = [norm(chunk, overflow, [tensors], False)[0] for norm in (loop_norm, clip_grads.l2_norm_impl)]
    if norms[0].shape != norms[1].shape or not torch.allclose(*norms, rtol=1e-6):
        wrong.append("norm")
    large = torch.randn(3, 3_000_001, generator=generator)  # torch's norm of so many loses 3e-4
    norm = clip_grads.l2_norm_impl(chunk, overflow, [[large, *tensors]], False)[0]
    exact = torch.linalg.vector_norm(torch.cat([x.double().ravel() for x in (large, *tensors)]))
    if not torch.allclose(norm.double(), exact, rtol=1e-6):
        wrong.append("norm of many elements")
    for in_place in (True, False):
        results = []
        for scale in (loop_scale, clip_grads.multi_tensor_scale_impl):
            source = [x.clone() for x in tensors]
            target = source if in_place else [torch.empty_like(x) for x in source]
            scale(chunk, overflow, [source, target], 0.3)
            results.append(target)
        if not all(map(torch.equal, *results)):
            wrong.append(f"scale, {in_place=}")
    copies = []
    for copy in (loop_copy, optimizer._multi_tensor_copy_this_to_that):
        copies.append([torch.empty_like(x, dtype=torch.bfloat16) for x in tensors])
        copy(this=tensors, that=copies[-1], overflow_buf=None)
        copy(this=[], that=[], overflow_buf=None)
    if not all(map(torch.equal, *copies)):
        wrong.append("copy")
    return wrong
