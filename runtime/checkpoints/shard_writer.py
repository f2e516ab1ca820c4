"""Writing of this rank's shards in megatron-core's torch_dist format, in three parts: plan, write, finish.

megatron-core's own strategy (`filesystem_async`) forks writers and spawns a server that runs the user's script again.
With it a save of a few KB took seconds, and one in fifteen failed or hung. Here a thread can write: it calls nothing
collective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import torch as mcore
from megatron.core.dist_checkpointing.strategies.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from megaloom.runtime.megatron import device
from megaloom.runtime.weights.safe_pickle import COMMON

from .checkpoint_folder import crc32_of

Shards = dict[str, list[ShardedBase]]


@frozen(eq=False)
class PlannedSave:
    """A save that all ranks have planned: it is to be written, and then finished."""

    write: Callable[[], None]  # writes this rank's shards; calls nothing collective
    finish: Callable[[], None]  # writes what all ranks have together; every rank calls it, after all have written


@define(eq=False)
class ShardWriter:
    """Saves a sharded state so that each rank writes its own file, and no rank starts a process.

    The files are those of megatron-core 0.16.1, whichever release is installed, so that any can continue a run: later
    ones save what is not sharded as a tensor `common_state`, which 0.16.1 does not look for, and read `common.pt` too.

    asynchronous: `plan` copies the shards to host memory, so that training may change them during the write.
    """

    asynchronous: bool
    checksums: dict[str, int] = field(factory=dict, init=False)  # of the files that this rank has written, by name

    def plan(self, state: dict[str, Any], folder: Path, *, validate: bool) -> PlannedSave:
        """Return the save of a state into an empty folder. Every rank calls it.

        validate: check that the shards of all ranks are each tensor once.
        """
        sharded, common = save_preprocess(state, validate)
        if not dist.get_rank():
            torch.save(common, folder / COMMON)
        shards, _, _ = mcore._replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
        if self.asynchronous:
            shards = _host_copies(shards)
        writer = PlannedWriter(folder, self.checksums)
        planner = mcore.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        planned, *_ = save_state_dict_async_plan(mcore.mcore_to_pyt_state_dict(shards), writer, planner=planner)

        def finish() -> None:
            save_state_dict_async_finalize(*planned)
            if not dist.get_rank():
                save_config(CheckpointingConfig("torch_dist", 1), str(folder))
            dist.barrier()

        return PlannedSave(writer.write, finish)


class PlannedWriter(FileSystemWriter):
    """Writer that remembers its plan, so that `write` needs no other rank."""

    def __init__(self, folder: str | Path, checksums: dict[str, int]) -> None:
        # torch would copy from a GPU ahead of writing, on the current stream of a thread that has no device.
        super().__init__(folder, sync_files=True, per_thread_copy_ahead=0)
        self.folder, self.checksums = Path(folder), checksums
        self.job: tuple[SavePlan, SavePlanner] | None = None
        self.results: list[WriteResult] = []

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Remember what `write` is to write."""
        self.job = plan, planner

    def write(self) -> None:
        """Write this rank's file, flush it to disk, and compute its checksum."""
        assert self.job
        self.results = self.write_data(*self.job).value()
        self.job = None  # frees the copies
        for name in {result.storage_data.relative_path for result in self.results}:
            self.checksums[name] = crc32_of(self.folder / name)

    def retrieve_write_results(self) -> list[WriteResult]:
        """Return the places in the file to which `write` has written each shard."""
        return self.results


def _host_copies(shards: Shards) -> Shards:
    """Return the shards with copies of their tensors in host memory."""
    copies = {name: [_host_copy(shard) for shard in group] for name, group in shards.items()}
    if device.gpu_count():
        torch.cuda.synchronize()
    return copies


def _host_copy(shard: ShardedBase) -> ShardedBase:
    if not isinstance(shard, ShardedTensor):
        return shard  # an object, which is pickled before `plan` returns
    data = shard.data.detach()
    if device.gpu_count() and data.is_pinned():
        return shard  # a copy already, gathered from a sharded optimizer
    return replace(shard, data=device.to_host(data) if data.is_cuda else data.clone())
