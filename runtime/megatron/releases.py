"""Differences between the releases of megatron-core that Megaloom runs on: 0.16.1 to 0.19.

Each function gives the installed release what it expects. What can be written alike for all releases stands where it is
used; docs/develop/megatron-core.md lists both. `device.prepare` must run before.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron.core.package_info import MAJOR, MINOR
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import moe_utils
from torch import Tensor, no_grad

INSTALLED = (MAJOR, MINOR)
"""The release of megatron-core that is installed, such as (0, 16)."""


def results_of_permute(copies: Tensor, probs: Tensor | None, order: Any) -> tuple[Any, ...]:
    """Return the results of a `permute` function as the token dispatchers unpack them.

    Since 0.17 there are two more, for kernels of Transformer Engine that pad: offsets, and tokens per expert.
    """
    return (copies, probs, order) if INSTALLED < (0, 17) else (copies, probs, order, None, None)


def no_cuda_graphs() -> dict[str, Any]:
    """Return the field of TransformerConfig that leaves out CUDA graphs.

    The default prints a deprecation warning before 0.18, which renamed the field and warns of the old name.
    """
    return {"cuda_graph_scope" if INSTALLED < (0, 18) else "cuda_graph_modules": []}


def weight_gather() -> str:
    """Return the method of DDP by which a sharded optimizer gathers the weights that it has updated.

    It gathers a chunk before 0.18, which gathers group after group of buckets.
    """
    return "start_param_sync" if INSTALLED < (0, 18) else "_start_bucket_group_param_sync"


def define_missing_names() -> None:
    """Define a name that megatron-core 0.16 reads but never sets if Transformer Engine is missing.

    The gate of experts fails without it (moe_utils.py:1192). 0.17 sets it.
    """
    if INSTALLED < (0, 17) and not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def avoid_compiler() -> None:
    """Let recomputed outputs be copied into the tensors that were freed, as megatron-core 0.16 does.

    Since 0.17 it compiles a C++ extension to share their memory, in the first backward pass: that needs ninja and a
    compiler, and takes half a minute.
    """
    if INSTALLED >= (0, 17):
        random._share_storage_ext = SimpleNamespace(share_storage=_copy_storage)


def _copy_storage(freed: Tensor, recomputed: Tensor) -> None:
    """Give a freed tensor the memory and the values that it had."""
    with no_grad():
        source, target = recomputed.untyped_storage(), freed.untyped_storage()
        target.resize_(source.size())
        target.copy_(source)
