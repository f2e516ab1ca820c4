"""The devices of this machine, and megatron-core on a machine without CUDA."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from megaloom.dsl.errors import UserError
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.runtime.launch import launcher
from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.host import usable_cores
from tests.support.limits import LIMIT


def test_a_machine_without_gpus():
    assert device.gpu_count() == 0 and not torch.cuda.is_available()
    assert device.device_count() == usable_cores()
    assert device.backend() == "gloo"
    assert device.current() == torch.device("cpu")
    assert device.local_cluster() == f"{usable_cores()}xCPU"


@pytest.mark.parametrize("name", [*device.PRESETS, "CPU"])
def test_the_planner_knows_every_device_that_is_recognised(name):
    assert cluster(f"2x{name}").device.name == name


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
    ],
)
def test_gpus_are_known_by_their_drivers_names(name, preset):
    assert device._known_preset(name) == preset


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090", "NVIDIA GH200 480GB"])
def test_an_unknown_gpu_is_told_with_what_would_work(name):
    with pytest.raises(UserError, match=f"no preset .* {name!r}; presets: .*GB300.*\\nrun `megaloom measure"):
        device._known_preset(name)


def test_preparing_is_idempotent_and_silent():
    code = (
        "from megaloom.runtime.megatron import device as d; d.prepare(); d.prepare(); import megatron.core.transformer"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""


def states():
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    x = torch.ones(100, requires_grad=True)

    def drop(y):
        with tensor_parallel.get_cuda_rng_tracker().fork():
            apart = torch.nn.functional.dropout(y)
        return apart + torch.nn.functional.dropout(y)

    out = tensor_parallel.checkpoint(drop, False, x)
    common = torch.rand(3)
    out.sum().backward()  # drops again: the gradient shows whether the same
    return out.detach(), x.grad, common


def test_a_device_that_is_asked_for_is_still_given():
    """Meta tensors above all, which take no memory. In a process of its own: what is made ready stays so."""
    program = (
        "import torch; from megaloom.runtime.megatron.device import prepare; prepare()\n"
        "with torch.device('meta'):\n"
        "    made = torch.empty(3), torch.zeros(3), torch.ones(2), torch.tensor([1.0]), torch.nn.Linear(2, 3).weight\n"
        "assert {t.device.type for t in made} == {'meta'}, made\n"
        "assert torch.empty(3, device='cuda').device.type == 'cpu'"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr


def test_random_states_are_kept_apart_and_restored_by_recomputation():
    (first, again, common), (second, second_again, also_common) = launcher.run(states, (), 2, timeout=LIMIT)
    assert torch.equal(first, again) and torch.equal(second, second_again)
    assert not torch.equal(first, second)
    assert torch.equal(common, also_common)


def uneven(lengths):
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = [torch.zeros(n, 2) for n in lengths]
    dist.all_gather(parts, torch.full((lengths[rank], 2), float(rank)))
    mine = torch.empty(lengths[rank], 2)
    dist.reduce_scatter(mine, [torch.full((n, 2), 10.0**i) for i, n in enumerate(lengths)])
    return torch.cat(parts)[:, 0].tolist(), (mine / world).tolist()


@pytest.mark.parametrize("lengths", [(1, 3, 0), (2, 2, 2)])
def test_gathering_and_scattering_parts_of_any_length(lengths):
    gathered = [float(rank) for rank, length in enumerate(lengths) for _ in range(length)]
    for rank, (results, mine) in enumerate(launcher.run(uneven, (lengths,), 3, timeout=LIMIT)):
        assert results == gathered
        assert mine == [[10.0**rank] * 2] * lengths[rank]


def router(dtype):
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    x, weight = torch.randn(5, 8), torch.randn(3, 8)
    return (router_gating_linear(x, weight, None, dtype) - x @ weight.T).abs().max().item()


def test_routing_in_float32_without_transformer_engine():
    assert launcher.run(router, (torch.float32,), 1, timeout=LIMIT)[0] < 1e-6
