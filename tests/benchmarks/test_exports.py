"""The benchmark of exports: a starter says which files the target's own code takes, and why it refuses others."""

import json
import sys
from pathlib import Path

from benchmarks.exports import launched, verdicts
from megaloom.dsl.catalog import find
from megaloom.planner.contract.layout import Layout
from megaloom.planner.export.export import export_plan
from megaloom.planner.export.target import Target
from tests.support.exported import case, groups, plan_with


def test_accelerate_starts_what_is_exported_and_refuses_what_is_not(tmp_path: Path) -> None:
    model, _ = find("gpt2")
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    text = export_plan(plan_with(model, Layout(dp=8), seq=1024), model, Target.ACCELERATE)
    good.write_text(text)
    bad.write_text(text.replace("megatron_lm_tp_degree: 1", "megatron_lm_tp_degree: one"))
    for path in (good, bad):
        path.with_suffix(".facts").write_text(json.dumps({"processes": 8, "words": [], "environment": {}}))
    found = verdicts(Target.ACCELERATE, "installed", sys.executable, [good, bad])
    assert found[good.name] == ("started", "")
    assert found[bad.name][0] == "refused" and found[bad.name][1].startswith("ValueError: invalid literal")


def test_the_words_of_a_script_are_those_that_torchrun_gets(tmp_path: Path) -> None:
    plan, model = case("llama3-8b")
    script = tmp_path / "run.sh"
    script.write_text(export_plan(plan, model, Target.MEGATRON_LM))
    facts = launched(script, tmp_path)
    words = [word for group in groups(script.read_text()).values() for word in group]
    assert facts["words"][-len(words) :] == words
    assert facts["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
