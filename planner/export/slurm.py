"""A plan as a job of Slurm: torchrun on every node, and `megaloom train` in each of its processes.

A plan for Megatron-core runs Megatron-LM there instead: see `megatron.script`.
"""

from __future__ import annotations

import shlex

from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.plans import Plan
from megaloom.planner.hardware.presets import PRESETS

from .decoder import cannot

PORT = 29500
MEET = """export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)"\n"""


def hosts(machine: Cluster) -> tuple[int, int]:
    """(machines, devices in each), as launchers count them: those of an NVL72 rack are 18 machines of 4."""
    preset = PRESETS.get(machine.device.name)
    each = min(preset.tray, machine.per_node) if preset and preset.tray > 1 else machine.per_node
    return machine.count // each, each


def head(machine: Cluster, name: str) -> str:
    """What sbatch reads: one task on each machine, which starts a process for each device."""
    if machine.device.name == "CPU":
        cannot("Slurm's script", f"{machine}: it asks for GPUs", "`megaloom train` starts processes on CPUs")
    nodes, each = hosts(machine)
    return f"""#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={each}
#SBATCH --exclusive
#SBATCH --output={name}-%j.log
# Account, partition and time are your cluster's: sbatch --account A --partition P --time 4:00:00 this-file.
"""


def job(plan: Plan, name: str, path: str) -> str:
    """A script for sbatch that trains by the plan in the file `path`, which all nodes must see under that path."""
    nodes, each = hosts(plan.cluster)
    return f"""#!/bin/bash
# {name} on {plan.cluster}: {plan.layout}
{head(plan.cluster, name)}# What is given after the file goes on to `megaloom train`: --data, --steps, --lr, ...
set -euo pipefail
{MEET}
srun torchrun --nnodes {nodes} --nproc-per-node {each} \\
  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$MASTER_ADDR:{PORT}" \\
  -m megaloom.runtime.cli train {shlex.quote(path)} "$@"
"""
