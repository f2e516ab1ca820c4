"""Script: build the device meshes of megatron-core's Megatron-FSDP on fake process groups.

Each argument is a layout, "ranks,tp,pp,cp,ep,etp". Prints a line for each: ok, or where Megatron-FSDP fails, and how.
"""

from __future__ import annotations

import sys
import traceback
from math import prod
from types import SimpleNamespace


def rearrange(tensor, pattern, **sizes):  # type: ignore[no-untyped-def]
    """Return what einops.rearrange does for the patterns of Megatron-FSDP; einops is not installed here."""
    read, written = (_axes(side) for side in pattern.split("->"))
    if tensor.dim() == len(read) > 1:
        sizes |= {name: size for (name,), size in zip(read, tensor.shape, strict=True)}
    names = [name for axis in read for name in axis]
    if prod(sizes[name] for name in names) != tensor.numel():
        raise ValueError(f"{tuple(tensor.shape)} is no {pattern} with {sizes}")
    order = [names.index(name) for axis in written for name in axis]
    whole = tensor.reshape([sizes[name] for name in names]).permute(order)
    return whole.reshape([prod(sizes[name] for name in axis) for axis in written])


def _axes(side: str) -> list[list[str]]:
    words = side.replace("(", " ( ").replace(")", " ) ").split()
    axes: list[list[str]] = []
    inside = False
    for word in words:
        if word in "()":
            inside = word == "("
            axes += [[]] if inside else []
        elif inside:
            axes[-1].append(word)
        else:
            axes.append([word])
    return axes


def build(world: int, tp: int, pp: int, cp: int, ep: int, etp: int) -> None:
    """Build the meshes of dense weights and of experts, on the first and the last rank."""
    from megatron.core import parallel_state
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    adapter.einops, adapter.HAVE_EINOPS = SimpleNamespace(rearrange=rearrange), True
    for rank in (0, world - 1):
        distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            parallel_state.initialize_model_parallel(
                tp,
                pp,
                context_parallel_size=cp,
                expert_model_parallel_size=ep,
                expert_tensor_parallel_size=etp,
                create_gloo_process_groups=False,
            )
            dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
            adapter._get_dp_tp_mesh(dense, parallel_state.get_tensor_model_parallel_group())
            experts = parallel_state.get_expert_data_parallel_group()
            adapter._get_dp_tp_mesh(experts, parallel_state.get_expert_tensor_parallel_group(), ep_size=ep)
        finally:
            parallel_state.destroy_model_parallel()
            distributed.destroy_process_group()


def main() -> None:
    """Build the meshes of each argument."""
    from megaloom.runtime.megatron import device

    device.prepare()
    for layout in sys.argv[1:]:
        try:
            build(*map(int, layout.split(",")))
            print("ok")
        except ValueError as error:
            print(*(frame.name for frame in traceback.extract_tb(error.__traceback__)), error)


if __name__ == "__main__":
    main()
