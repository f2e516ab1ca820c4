"""The process groups of a layout, created by megatron-core's parallel_state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from attrs import frozen
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.constants import default_pg_timeout

from megaloom.dsl import UserError
from megaloom.planner.contract.layout import Layout


@frozen(eq=False)
class ProcessGroups:
    """This rank's index on every axis of the device mesh, and its process groups."""

    layout: Layout
    collection: ProcessGroupCollection

    def of_axis(self, axis: str) -> dist.ProcessGroup:
        """Return this rank's process group along an axis, such as "tp" or "etp"."""
        group: dist.ProcessGroup = getattr(self.collection, {"etp": "expt_tp"}.get(axis, axis))
        return group

    @property
    def dp_rank(self) -> int:
        """Return this rank's index in its data-parallel group."""
        return int(self.collection.dp.rank())

    @property
    def tp_rank(self) -> int:
        """Return this rank's index in its tensor-parallel group."""
        return int(self.collection.tp.rank())

    @property
    def cp_rank(self) -> int:
        """Return this rank's index in its context-parallel group."""
        return int(self.collection.cp.rank())

    @property
    def pp_rank(self) -> int:
        """Return this rank's pipeline rank."""
        return int(self.collection.pp.rank())

    @property
    def ep_rank(self) -> int:
        """Return this rank's index in its expert-parallel group."""
        return int(self.collection.ep.rank())

    @property
    def etp_rank(self) -> int:
        """Return this rank's index in its expert-tensor-parallel group."""
        return int(self.collection.expt_tp.rank())

    @property
    def is_last_pipeline_rank(self) -> bool:
        """Return whether this is the last pipeline rank."""
        return self.pp_rank == self.layout.pp - 1


def create_process_groups(layout: Layout) -> ProcessGroups:
    """Return the process groups of a layout, created once: engines of one process share them.

    Raise UserError if torch.distributed has another number of ranks, or if the process has groups of another mesh.
    """
    if dist.get_world_size() != layout.world:
        raise UserError(
            f"the plan is for {layout.world} ranks, but {dist.get_world_size()} are running\n"
            f"start {layout.world} ranks, or plan for {dist.get_world_size()}"
        )
    if parallel_state.model_parallel_is_initialized():
        _check_mesh(layout)
    else:
        with _shared_single_rank_groups():
            _initialize(layout)
    return ProcessGroups(layout, ProcessGroupCollection.use_mpu_process_groups())


def collective_timeout() -> timedelta:
    """Return the timeout of collectives of all ranks. Without it, a new group would have its backend's default."""
    world = dist.group.WORLD
    options = world._get_backend(world._device_types[0]).options
    timeout: timedelta = options._timeout if options else default_pg_timeout  # torch's fake backend has no options
    return timeout


def _check_mesh(layout: Layout) -> None:
    """Raise UserError unless the process groups of this process are those of a layout."""
    wanted = {axis: getattr(layout, axis) for axis in ("tp", "pp", "cp", "ep", "etp", "vpp")}
    found = {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "etp": parallel_state.get_expert_tensor_parallel_world_size(),
        "vpp": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
    }
    differing = [axis for axis in wanted if wanted[axis] != found[axis]]
    if differing:
        shown = ", ".join(f"{axis} {found[axis]}, not {wanted[axis]}" for axis in differing)
        fixed = ", ".join(f"{axis!r}: {degree}" for axis, degree in found.items())
        raise UserError(
            f"this process has an engine of another device mesh: {shown}\n"
            f"plan the models of one process with equal tp, pp, cp, ep, etp and vpp, by plan(…, fixed={{{fixed}}}), "
            "or run them in separate processes"
        )


def _initialize(layout: Layout) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=collective_timeout() / timedelta(minutes=1),
    )


@contextmanager
def _shared_single_rank_groups() -> Iterator[None]:
    """Create one group per single rank and use it on all axes: NCCL allocates about 350 MiB for each group in use."""
    create, single = parallel_state.create_group, {}

    def create_once(ranks: list[int], **options: Any) -> Any:
        if len(ranks) > 1:
            return create(ranks, **options)
        if ranks[0] not in single:
            single[ranks[0]] = create(ranks, **options)
        return single[ranks[0]]

    parallel_state.create_group = create_once
    try:
        yield
    finally:
        parallel_state.create_group = create
