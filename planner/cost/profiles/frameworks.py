"""Profiles of frameworks with which plans are made: our runtime, and Megatron-core with Transformer Engine."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megaloom.planner.contract.workload import Runtime

from .groups import FrameworkProfile, compose
from .kernel_features import ENGINE_KERNELS, MEGALOOM_KERNELS, TORCH_KERNELS

EAGER = compose("torch, kernel by kernel", [TORCH_KERNELS])
OWN = compose("megaloom", [MEGALOOM_KERNELS], EAGER)
MEGATRON = compose("Megatron-core with Transformer Engine", [ENGINE_KERNELS])
PROFILES: Mapping[Runtime, FrameworkProfile] = MappingProxyType({Runtime.MEGALOOM: OWN, Runtime.MEGATRON: MEGATRON})
