"""Selective recompute frees what the facts say of each module: what is alive after a forward pass, byte by byte."""

from __future__ import annotations

from typing import Any

import pytest

from megaloom.dsl import DType, graph, saved
from megaloom.dsl.catalog import find
from megaloom.planner.contract.choices import Module, Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Stage
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.runtime.launch import launcher
from tests.support.limits import LIMIT
from tests.support.paths import TEST_MODELS

MODELS = TEST_MODELS / "small.py"
BATCH, SEQ = 2, 32
NBYTES = {DType.COMPUTE: 4, DType.FLOAT32: 4, DType.INDEX: 8, DType.MASK: 1}
# How many times what the facts say is freed, at the least and at the most: torch's own kernels keep twice a norm's
# output, and of an expert's activation each of its four steps. The keys that turn enter latent attention's part.
CASES = {
    ("tiny_llama", Module.LAYERNORM): (1.0, 2.1),
    ("tiny_parallel", Module.LAYERNORM): (1.0, 1.1),
    ("tiny_llama", Module.MLP): (1.0, 1.7),
    ("tiny_mixtral", Module.MOE_ACT): (1.0, 4.0),
    ("tiny_mixtral", Module.MOE): (1.0, 2.0),
    ("tiny_deepseek_v3", Module.SHARED_EXPERTS): (1.0, 1.7),
    ("tiny_deepseek_v3", Module.MLA_UP_PROJ): (0.96, 1.0),
}


def alive(names: set[str]) -> dict[tuple[str, str], int]:
    """On the only rank: bytes that are alive after a forward pass of each model, nothing or one module made again."""
    import gc

    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from megaloom.runtime.megatron.build_context import make_build_context
    from megaloom.runtime.megatron.process_groups import create_process_groups
    from megaloom.runtime.modules.model_chunk import ModelChunk

    class Watch(TorchDispatchMode):
        """The storages that operations allocate, by address; it keeps none of them alive."""

        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[int, Any] = {}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for x in tree_leaves(out):
                if isinstance(x, torch.Tensor):
                    storage = x.untyped_storage()
                    self.seen[storage._cdata] = torch.multiprocessing.reductions.StorageWeakRef(storage)
            return out

        @property
        def nbytes(self) -> int:
            results = (torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self.seen.values())
            return sum(storage.nbytes() for storage in results if storage is not None)

    out = {}
    for name in sorted(names):
        g = graph(find(f"{MODELS}:{name}")[0])
        tokens = torch.arange(BATCH * SEQ).reshape(BATCH, SEQ) % 127
        for module in ("", *(m for n, m in CASES if n == name)):
            again = {"recompute": Recompute.SELECTIVE, "recompute_modules": (module,)} if module else {}
            layout, load = Layout(**again), Workload(seq=SEQ, batch=BATCH, precision=Precision.FP32)
            groups = create_process_groups(layout)
            model_parallel_cuda_manual_seed(0)
            chunk = Stage(
                rank=0, chunk=0, start=0, stop=len(g.nodes), params=0, forward_seconds=0.0, backward_seconds=0.0
            )
            stage = ModelChunk(g, chunk, make_build_context(g, layout, load, groups))
            torch.manual_seed(0)
            for p in stage.parameters():
                torch.nn.init.normal_(p, std=0.02)
            with Watch() as watch:
                loss = next(iter(stage(tokens=tokens, labels=tokens).values())).sum()
                gc.collect()  # what only a cycle of references keeps
                out[name, str(module)] = watch.nbytes
            loss.backward()
            parallel_state.destroy_model_parallel()
    return out


@pytest.fixture(scope="module")
def measurements() -> dict[tuple[str, str], int]:
    return launcher.run(alive, ({name for name, _ in CASES},), 1, timeout=LIMIT)[0]


@pytest.mark.parametrize(("name", "module"), CASES)
def test_what_is_made_again_is_not_kept(name: str, module: Module, measurements: dict[tuple[str, str], int]) -> None:
    nodes = graph(find(f"{MODELS}:{name}")[0]).nodes
    none, some = (
        sum(s.elements * NBYTES[s.dtype] for s in saved(nodes, batch=BATCH, seq=SEQ, **how))
        for how in ({}, {"recompute": "selective", "modules": (module,)})
    )
    least, most = CASES[name, module]
    freed = measurements[name, ""] - measurements[name, str(module)]
    assert none > some
    assert least * (none - some) <= freed <= most * (none - some)
