"""Jobs of `megaloom train`: its program's schema or parser accepts each, and it starts the plan on all its machines."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from attrs import evolve
from kubeflow.training import ApiClient

from megaloom.dsl import UserError
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Runtime
from megaloom.planner.export.export import cut_for, export_plan
from megaloom.planner.export.target import Target
from tests.support.exported import case, plan_with
from tests.support.limits import LIMIT

SLURM_CONF = """\
ClusterName=test
SlurmctldHost=localhost
AuthType=auth/none
GresTypes=gpu
MessageTimeout=1
TCPTimeout=1
SlurmctldTimeout=1
NodeName=node[1-128] Gres=gpu:8
PartitionName=test Nodes=ALL Default=YES
"""
CHECK_SKY_TASK = """
import json, sys
from sky.utils import common_utils, schemas
task = json.load(sys.stdin)
common_utils.validate_schema(task, schemas.get_task_schema())
common_utils.validate_schema(task["resources"], schemas.get_resources_schema())
for store in task["file_mounts"].values():
    common_utils.validate_schema(store, schemas.get_storage_schema())
"""


def check_pytorch_job(job: Any) -> None:
    """Raise an error unless the models of Kubeflow's and Kubernetes' clients hold every field of a PyTorchJob."""
    client = ApiClient()
    held = client.sanitize_for_serialization(
        client.deserialize(SimpleNamespace(data=json.dumps(job)), "KubeflowOrgV1PyTorchJob")
    )
    for replicas in held["spec"]["pytorchReplicaSpecs"].values():
        limits = replicas["template"]["spec"]["containers"][0]["resources"]["limits"]
        limits["nvidia.com/gpu"] = int(limits["nvidia.com/gpu"])  # a quantity, which the client makes a string
    assert held == job


def check_sky_task(task: Any, home: Path) -> None:
    """Raise an error unless SkyPilot's schemas accept a task. SkyPilot writes files into `home` when it is imported."""
    command = [sys.executable, "-c", CHECK_SKY_TASK]
    env = {**os.environ, "HOME": str(home)}
    done = subprocess.run(command, input=json.dumps(task), env=env, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr


def check_slurm_job(script: str, folder: Path) -> None:
    """Raise an error unless sbatch accepts the options of a job, which it parses before it looks for a controller."""
    (folder / "job.sh").write_text(script)
    (folder / "slurm.conf").write_text(SLURM_CONF)
    env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    command = ["sbatch", "--test-only", str(folder / "job.sh")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)
    assert "Unable to contact slurm controller" in done.stderr, done.stderr


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
    check_pytorch_job(job)
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
    check_sky_task(task, tmp_path)
    assert (task["num_nodes"], task["resources"]) == (128, {"accelerators": "GB200:4"})
    given = {"SKYPILOT_NODE_RANK": "5", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    told = started(["bash", "-euc", task["run"]], tmp_path, **given)
    assert told == [*words(5, "10.0.0.1", "29500", "a plan.json"), "--out", "/runs/deepseek-v3"]


@pytest.mark.skipif(shutil.which("sbatch") is None, reason="no sbatch (Debian: slurm-client)")
def test_sbatch_accepts_a_slurm_job(tmp_path: Path) -> None:
    plan, model = case("llama3-8b")
    for made in (plan, evolve(plan, runtime=Runtime.MEGATRON)):
        script = export_plan(made, model, Target.SLURM)
        check_slurm_job(script, tmp_path)
        for wrong in (script.replace("--gpus-per-node=", "--gpu-per-node="), script.replace("--nodes=", "--nodes=x")):
            with pytest.raises(AssertionError, match=r"unrecognized option|not a valid node count"):
                check_slurm_job(wrong, tmp_path)


def test_bash_parses_a_slurm_job() -> None:
    plan, model = case("llama3-8b")
    subprocess.run(["bash", "-n", "-c", export_plan(plan, model, Target.SLURM)], check=True, timeout=LIMIT)


@pytest.mark.parametrize("field", ["cleanPodPolicy", "restartPolicy", "workingDir", "emptyDir", "mountPath"])
def test_a_misspelt_field_of_a_pytorch_job_is_found(field: str) -> None:
    text = export_plan(*case("deepseek-v3"), Target.KUBERNETES)
    with pytest.raises((AssertionError, ValueError)):
        check_pytorch_job(yaml.safe_load(text.replace(f"{field}:", f"{field}s:")))


@pytest.mark.parametrize("field", ["num_nodes", "accelerators", "mode"])
def test_a_misspelt_field_of_a_sky_task_is_found(field: str, tmp_path: Path) -> None:
    text = export_plan(*case("deepseek-v3"), Target.SKYPILOT)
    with pytest.raises(AssertionError, match=f"did you mean '{field}'"):
        check_sky_task(yaml.safe_load(text.replace(f"{field}:", f"{field}s:")), tmp_path)


@pytest.mark.parametrize("target", [Target.KUBERNETES, Target.SKYPILOT])
def test_what_a_job_cannot_run_is_refused(target: Target) -> None:
    plan, model = case("llama3-8b")
    with pytest.raises(
        UserError, match=f"{target.program} cannot express a plan made with --runtime megatron\n.*slurm"
    ):
        export_plan(evolve(plan, runtime=Runtime.MEGATRON), model, target)
    with pytest.raises(UserError, match="cannot express 8xCPU: its jobs ask for GPUs"):
        export_plan(plan_with(model, Layout(dp=8), gpus="8xCPU"), model, target)
    with pytest.raises(UserError, match=f"the {target.program} job would run .*: the runtime does not train in mxfp8"):
        export_plan(plan_with(model, Layout(), gpus="1xB200", precision="mxfp8"), model, target)
