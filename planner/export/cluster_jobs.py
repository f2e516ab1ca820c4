"""Write a plan as a job of `megaloom train` for Kubernetes (Kubeflow's PyTorchJob) or SkyPilot, in YAML.

Sources of the fields: kubeflow/training-operator, manifests/base/crds/kubeflow.org_pytorchjobs.yaml, and the variables
that it gives to each pod, pkg/controller.v1/pytorch/envvar.go; SkyPilot, docs/source/reference/yaml-spec.rst.
"""

from __future__ import annotations

import json

from megaloom.planner.contract.plans import Plan

from .quoting import pod_command, shell_word, title
from .slurm import PORT, check_gpus, machines
from .target import Target

TRAIN = "-m megaloom.runtime.cli train"
SKYPILOT_NAMES = {"A100": "A100-80GB", "A100-PCIe": "A100-80GB", "A100-40GB": "A100", "A100-PCIe-40GB": "A100"}
"""SkyPilot's names of devices, where they are not ours."""
LONGEST_NAME = 40  # Kubernetes: 63 characters with what the operator appends


def pytorch_job(plan: Plan, name: str, path: str) -> str:
    """Return a PyTorchJob: one pod per machine, each of which starts one process per GPU.

    The plan in `path`, its model and the run folder lie on a volume that all pods mount.
    """
    check_gpus(plan.cluster, Target.KUBERNETES)
    nodes, each = machines(plan.cluster)
    workers = f"    Worker:\n{_replicas(nodes - 1, each, path, nodes)}" if nodes > 1 else ""
    return f"""{title(plan, name)}# kubectl apply -f THIS_FILE, on a cluster with Kubeflow's training operator
# Set `image` to one that has megaloom[train], and `claimName` to a volume claim with plan, model, data and runs.
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: {_kubernetes_name(name)}
spec:
  runPolicy:
    cleanPodPolicy: Running
    backoffLimit: 3
  pytorchReplicaSpecs:
    Master:
{_replicas(1, each, path, nodes)}{workers}"""


def _replicas(count: int, each: int, path: str, nodes: int) -> str:
    """Return the specification of equal pods."""
    command = (
        f"exec torchrun --nnodes {nodes} --nproc-per-node {each} --node-rank $RANK "
        f"--master-addr $MASTER_ADDR --master-port $MASTER_PORT {TRAIN} {shell_word(path)}"
    )
    return f"""      replicas: {count}
      restartPolicy: OnFailure
      template:
        spec:
          containers:
          - name: pytorch
            image: megaloom:latest
            workingDir: /workspace
            command: ["bash", "-c", {pod_command(command)}]
            resources:
              limits:
                nvidia.com/gpu: {each}
            volumeMounts:
            - name: workspace
              mountPath: /workspace
            - name: shm
              mountPath: /dev/shm
          volumes:
          - name: workspace
            persistentVolumeClaim:
              claimName: megaloom
          - name: shm
            emptyDir:
              medium: Memory
"""


def _kubernetes_name(name: str) -> str:
    """Return a name of lower-case letters, digits and dashes."""
    letters = "".join(c if c.isalnum() and c.isascii() else "-" for c in name.lower())
    return letters[:LONGEST_NAME].strip("-") or "megaloom"


def sky_task(plan: Plan, name: str, path: str) -> str:
    """Return a SkyPilot task that starts one process per GPU on each of its nodes.

    The plan in `path` and its model lie in the working directory, which SkyPilot copies to each node.
    """
    check_gpus(plan.cluster, Target.SKYPILOT)
    nodes, each = machines(plan.cluster)
    device = plan.cluster.device.name
    return f"""{title(plan, name)}# sky launch THIS_FILE, in the folder of the plan and its model
# Nodes share /runs: give your bucket, or a volume. Add --data to the last line.
name: {_kubernetes_name(name)}
workdir: .
num_nodes: {nodes}
resources:
  accelerators: {json.dumps(f"{SKYPILOT_NAMES.get(device, device)}:{each}")}
file_mounts:
  /runs:
    name: megaloom-runs
    mode: MOUNT
setup: |
  pip install 'megaloom[train]'
run: |
  torchrun --nnodes {nodes} --nproc-per-node {each} --node-rank $SKYPILOT_NODE_RANK \\
    --master-addr "$(echo "$SKYPILOT_NODE_IPS" | head -n1)" --master-port {PORT} \\
    {TRAIN} {shell_word(path)} --out /runs/{_kubernetes_name(name)}
"""
