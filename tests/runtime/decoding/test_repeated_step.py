"""A step that is captured and repeated computes what the oracle computes, with a stand-in for CUDA graphs on the CPU.

The stand-in records the kernels of a step with their tensors, and runs them again: as a graph does, without the host.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from attrs import frozen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from megaloom.runtime.launch import launcher
from tests.runtime.decoding import test_decoder
from tests.support.limits import LIMIT

READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}  # the host waits for them
CAPTURED = ("llama", "gpt2", "bloom", "gemma3", "packed", "mamba2", "nemotron-h", "t5", "own layers", "adapters")
NOT_CAPTURED = ("mixtral", "deepseek-v3")


@frozen
class Repeated:
    """The largest difference from the oracle's logits, and the graphs that were captured and run."""

    family: str
    difference: float | None
    captured: int
    replayed: int


class StandIn:
    """Records kernels, and runs them again."""

    captured, replayed = 0, 0

    def __init__(self) -> None:
        self.kernels: list[tuple[Any, Any, Any, Any]] = []

    def replay(self) -> None:
        StandIn.replayed += 1
        made: dict[int, Tensor] = {}
        for function, args, kwargs, out in self.kernels:
            given = tree_map(lambda x: made.get(id(x), x) if isinstance(x, Tensor) else x, (args, kwargs))
            new = function(*given[0], **given[1])
            for old, now in zip(tree_leaves(out), tree_leaves(new), strict=True):
                if isinstance(old, Tensor):
                    made[id(old)] = now
        result = self.kernels[-1][-1]
        result.copy_(made[id(result)])


class Capture(TorchDispatchMode):
    """Records the kernels of a step; what it wrote in place is as before after it, since a capture runs no kernel."""

    def __init__(self, graph: StandIn, **options: str) -> None:
        super().__init__()
        self.graph, self.before = graph, dict[int, tuple[Tensor, Tensor]]()
        StandIn.captured += 1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function not in READS, f"{function} waits for the device"
        if function._schema.is_mutable:
            self.before.setdefault(id(args[0]), (args[0], args[0].clone()))
        out = function(*args, **(kwargs or {}))
        self.graph.kernels.append((function, args, kwargs or {}, out))
        return out

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for x, values in self.before.values():
            x.copy_(values)


class Warn(TorchDispatchMode):
    """Warns where CUDA's synchronization debug mode does."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in READS:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        return function(*args, **(kwargs or {}))


def repeated(names: tuple[str, ...]) -> list[Repeated]:
    """On the rank: write tokens of each family by captured steps."""
    from megatron.core import parallel_state

    from megaloom.runtime.decoding import decoding_state
    from megaloom.runtime.ops import kv_cache

    warn = Warn()
    active = []

    def set_mode(mode: str) -> None:
        if mode == "warn":
            active.append(warn.__enter__())
        elif active:
            active.pop().__exit__(None, None, None)

    out = []
    with (
        patch.object(decoding_state, "device", SimpleNamespace(gpu_count=lambda: 1)),
        patch.object(decoding_state, "STEPS_BEFORE", 1),
        patch.object(kv_cache, "BLOCK_COLUMNS", 5),
        patch.object(test_decoder, "STEPS", 9),
        patch.object(torch.cuda, "CUDAGraph", StandIn),
        patch.object(torch.cuda, "graph", Capture),
        patch.object(torch.cuda, "set_sync_debug_mode", set_mode),
    ):
        for name in names:
            StandIn.captured = StandIn.replayed = 0
            found = test_decoder.difference(name, 1, 1)
            out.append(Repeated(name, found, StandIn.captured, StandIn.replayed))
            parallel_state.destroy_model_parallel()
    return out


def test_captured_steps_are_those_of_the_host() -> None:
    (found,) = launcher.run(repeated, (CAPTURED,), 1, timeout=LIMIT)
    assert not [x for x in found if x.difference is None or not x.difference < 1e-4]
    assert not [x for x in found if not 2 <= x.captured < x.replayed]


def test_a_step_that_reads_data_is_not_captured() -> None:
    (found,) = launcher.run(repeated, (NOT_CAPTURED,), 1, timeout=LIMIT)
    assert not [x for x in found if x.difference is None or not x.difference < 1e-4]
    assert not [x for x in found if x.captured]
