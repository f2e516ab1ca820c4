"""Write a plan as a Slurm job that runs `megaloom train` on every device.

A plan for Megatron-core becomes a job that runs Megatron-LM: see `megatron_lm.slurm_script`.
"""

from __future__ import annotations

from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.plans import Plan
from megaloom.planner.hardware.presets import PRESETS

from .quoting import job_name, shell_word, title
from .target import Target, refuse

PORT = 29500
# A step of Slurm has one CPU unless it asks for more, and does not take over what the job asked for.
SRUN = 'srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_ON_NODE"'
MASTER_ADDR = """export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)"\n"""


def machines(cluster: Cluster) -> tuple[int, int]:
    """Return (machines, devices per machine), as launchers count them: an NVL72 rack is 18 machines of 4 devices."""
    preset = PRESETS.get(cluster.device.name)
    each = min(preset.tray, cluster.per_node) if preset and preset.tray > 1 else cluster.per_node
    return cluster.count // each, each


def check_gpus(cluster: Cluster, target: Target) -> None:
    """Raise UserError for a cluster without GPUs: jobs ask for some."""
    if cluster.device.name == "CPU":
        refuse(target, f"{cluster}: its jobs ask for GPUs", "run `megaloom train` without a job")


def sbatch_header(cluster: Cluster, name: str) -> str:
    """Return the #SBATCH lines: one task per machine, which starts one process per device."""
    check_gpus(cluster, Target.SLURM)
    nodes, each = machines(cluster)
    name = job_name(name)
    return f"""#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={each}
#SBATCH --exclusive
#SBATCH --output={name}-%j.log
# Give your cluster's account, partition and time: sbatch --account A --partition P --time 4:00:00 THIS_FILE
"""


def train_job(plan: Plan, name: str, path: str) -> str:
    """Return the script for sbatch that trains by the plan in `path`, a file that every machine sees there."""
    nodes, each = machines(plan.cluster)
    return f"""#!/bin/bash
{title(plan, name)}{sbatch_header(plan.cluster, name)}\
# Arguments after THIS_FILE go to `megaloom train`: --data, --steps, --lr, ...
set -euo pipefail
{MASTER_ADDR}
{SRUN} torchrun --nnodes {nodes} --nproc-per-node {each} \\
  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$MASTER_ADDR:{PORT}" \\
  -m megaloom.runtime.cli train {shell_word(path)} "$@"
"""
