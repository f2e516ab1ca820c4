"""A run of an earlier version: its artefact, run folder, model.json, plan and checkpoint load."""

from __future__ import annotations

from pathlib import Path

import torch

from megaloom.dsl import fingerprint, graph
from megaloom.planner.rules.plan_check import check_plan
from megaloom.runtime.checkpoints.checkpoint_folder import latest
from megaloom.runtime.convert.run_weights import checkpoint_weights
from megaloom.runtime.training.artefact import unpack
from megaloom.runtime.training.run_folder import load_run
from tests.support.paths import ROOT


def test_an_artefact_of_version_1_loads(tmp_path: Path) -> None:
    """It has a model.json of version 1, a plan of version 9 and a run.json of version 1."""
    folder = unpack(ROOT / "tests" / "golden" / "run-v1.megaloom", tmp_path / "run")
    assert '"version":1' in (folder / "model.json").read_text()[:20]
    run = load_run(folder)
    assert fingerprint(run.model) == run.plan.fingerprint == "1-c8c0e51946b58fe9"
    check_plan(run.plan, run.model)
    assert run.recipe.steps == 2
    checkpoint = latest(folder, fingerprint=run.plan.fingerprint)
    assert checkpoint is not None
    weights = checkpoint_weights(graph(run.model), checkpoint)
    assert all(bool(torch.isfinite(view.read()).all()) for view in weights.values())
