"""Jobs of `megaloom train`: each has the fields that its program knows, and starts the plan on all its machines."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from attrs import evolve

from megaloom.dsl import UserError
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Runtime
from megaloom.planner.export.export import cut_for, export_plan
from megaloom.planner.export.target import Target
from tests.support.exported import case, plan_with
from tests.support.limits import LIMIT

# Fields that we use, with the type of each. Kubeflow: kubeflow.org_pytorchjobs.yaml of training-operator 1.8 and the
# pod specification of Kubernetes; * stands for a name of the user's. SkyPilot: docs/source/reference/yaml-spec.rst.
POD = {
    "containers": [
        {
            "name": str,
            "image": str,
            "workingDir": str,
            "command": [str],
            "resources": {"limits": {"*": int}},
            "volumeMounts": [{"name": str, "mountPath": str}],
        }
    ],
    "volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str}, "emptyDir": {"medium": str}}],
}
REPLICAS = {"replicas": int, "restartPolicy": str, "template": {"spec": POD}}
PYTORCH_JOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "runPolicy": {"cleanPodPolicy": str, "backoffLimit": int},
        "pytorchReplicaSpecs": {"Master": REPLICAS, "Worker": REPLICAS},
    },
}
SKY_TASK = {
    "name": str,
    "workdir": str,
    "num_nodes": int,
    "resources": {"accelerators": str},
    "file_mounts": {"*": {"name": str, "mode": str}},
    "setup": str,
    "run": str,
}
SBATCH = {"--job-name", "--nodes", "--ntasks-per-node", "--gpus-per-node", "--exclusive", "--output"}  # man sbatch


def unknown(value: Any, schema: Any, where: str = "") -> list[str]:
    """Return the fields of a document that a schema does not have, or whose type is another."""
    if isinstance(schema, type):
        return [] if type(value) is schema else [f"{where}: {value!r}"]
    if isinstance(schema, list):
        return [p for item in value for p in unknown(item, schema[0], where)] if isinstance(value, list) else [where]
    if not isinstance(value, dict):
        return [where]
    known = {key: schema.get(key, schema.get("*")) for key in value}
    return [
        problem
        for key, below in known.items()
        for problem in ([f"{where}.{key}"] if below is None else unknown(value[key], below, f"{where}.{key}"))
    ]


def started(command: list[str], folder: Path, **variables: str) -> list[str]:
    """Return the words with which a command starts torchrun."""
    (folder / "torchrun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (folder / "torchrun").chmod(0o755)
    env = {**os.environ, **variables, "PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(
        command, env=env, capture_output=True, text=True, check=True, timeout=LIMIT
    ).stdout.splitlines()


def words(node: int, host: str, port: str, path: str) -> list[str]:
    """Return the words that start the processes of one of 128 machines with four GPUs."""
    meeting = ["--node-rank", str(node), "--master-addr", host, "--master-port", port]
    return ["--nnodes", "128", "--nproc-per-node", "4", *meeting, "-m", "megaloom.runtime.cli", "train", path]


def test_a_pytorch_job_starts_the_plan_on_all_pods(tmp_path: Path) -> None:
    plan, model = case("deepseek-v3")
    assert cut_for(Target.KUBERNETES, plan, model) is plan
    job = yaml.safe_load(export_plan(plan, model, Target.KUBERNETES, "plans/a plan.json"))
    assert unknown(job, PYTORCH_JOB) == []
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert re.fullmatch("[a-z0-9]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert (replicas["Master"]["replicas"], replicas["Worker"]["replicas"]) == (1, 127)
    for node, kind in ((0, "Master"), (7, "Worker")):
        (container,) = replicas[kind]["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"  # the operator looks for this name
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
        given = {"RANK": str(node), "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
        told = started(container["command"], tmp_path, **given)
        assert told == words(node, "job-master-0", "23456", "plans/a plan.json")


def test_one_machine_needs_no_workers() -> None:
    plan, model = case("gpt2")
    job = yaml.safe_load(export_plan(plan, model, Target.KUBERNETES))
    assert list(job["spec"]["pytorchReplicaSpecs"]) == ["Master"]
    task = yaml.safe_load(export_plan(plan, model, Target.SKYPILOT))
    assert (task["num_nodes"], task["resources"]) == (1, {"accelerators": "A100-80GB:8"})


def test_a_sky_task_starts_the_plan_on_all_nodes(tmp_path: Path) -> None:
    plan, model = case("deepseek-v3")
    task = yaml.safe_load(export_plan(plan, model, Target.SKYPILOT, "a plan.json"))
    assert unknown(task, SKY_TASK) == []
    assert (task["num_nodes"], task["resources"]) == (128, {"accelerators": "GB200:4"})
    given = {"SKYPILOT_NODE_RANK": "5", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    told = started(["bash", "-euc", task["run"]], tmp_path, **given)
    assert told == [*words(5, "10.0.0.1", "29500", "a plan.json"), "--out", "/runs/deepseek-v3"]


def test_a_slurm_job_has_options_of_sbatch() -> None:
    plan, model = case("llama3-8b")
    script = export_plan(plan, model, Target.SLURM)
    options = {line.split()[1].partition("=")[0] for line in script.splitlines() if line.startswith("#SBATCH")}
    assert options == SBATCH
    subprocess.run(["bash", "-n", "-c", script], check=True, timeout=LIMIT)


@pytest.mark.parametrize("target", [Target.KUBERNETES, Target.SKYPILOT])
def test_what_a_job_cannot_run_is_refused(target: Target) -> None:
    plan, model = case("llama3-8b")
    with pytest.raises(
        UserError, match=f"{target.program} cannot express a plan made with --runtime megatron\n.*slurm"
    ):
        export_plan(evolve(plan, runtime=Runtime.MEGATRON), model, target)
    with pytest.raises(UserError, match="cannot express 8xCPU: its jobs ask for GPUs"):
        export_plan(plan_with(model, Layout(dp=8), gpus="8xCPU"), model, target)
    with pytest.raises(UserError, match=f"the {target.program} job would run .*: the runtime does not train in fp8"):
        export_plan(plan_with(model, Layout(), precision="fp8"), model, target)
