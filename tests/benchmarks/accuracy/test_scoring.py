"""The cost model against published training runs, and the scores themselves."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.accuracy.__main__ import main
from benchmarks.accuracy.pair_order import pair_classes
from benchmarks.accuracy.records import record_line
from benchmarks.accuracy.run_files import read_runs, shipped_records
from benchmarks.accuracy.scoreboard import validation_json
from benchmarks.accuracy.scoring import (
    Predicted,
    choices,
    p90,
    predict,
    priced_as,
    validate_files,
)
from megaloom.dsl import UserError, params
from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Precision
from tests.support.published import OLDER, older_rows, sample_reasons, sample_runs


def test_the_classic_runs_on_a100s_are_predicted() -> None:
    """Narayanan et al., SC21, table 1, and Korthikanti et al., table 5: 1.7 to 1008 billion parameters."""
    errors = [
        abs(predict(run).time_error or 0.0) for run in sample_runs().values() if run.source in ("sc21", "korthikanti")
    ]
    assert len(errors) >= 14
    assert median(errors) < 0.05
    assert p90(errors) < 0.10


def test_pipelines_of_many_depths_are_predicted_in_time_and_memory() -> None:
    """1F1B and interleaved runs of Qi et al. (zero bubble, arXiv:2401.10241) on 8 to 32 A100s."""
    predictions = [predict(run) for run in sample_runs().values() if run.source == "zero-bubble"]
    assert len(predictions) >= 12
    assert median(abs(p.time_error or 0.0) for p in predictions) < 0.05
    assert median(abs(p.memory_error or 0.0) for p in predictions) < 0.05


def test_a_row_becomes_the_model_and_the_layout_that_were_run() -> None:
    run = sample_runs()["sc21-002"]
    assert run.layout == Layout(dp=32, tp=2, micro_batch=16, recompute=Recompute.FULL, overlaps=())
    assert run.workload.precision is Precision.FP16
    assert params(run.model) == pytest.approx(3.6e9, rel=0.02)
    assert not run.profile.attention.fused
    sparse = sample_runs()["simumax-005"]
    assert sparse.sparse and sparse.layout.ep == 8


def test_rows_that_cannot_be_predicted_say_why() -> None:
    reasons = sample_reasons()
    assert reasons["nemo-automodel-001"] == "the layers of nemotron3-super (hybrid-mamba-latent-moe) are not known"
    assert "ZB-" in "".join(reasons.values())
    assert "no pre-training" in reasons["megatron-lm-tests-018"]


def test_what_was_measured_does_not_change_what_is_predicted() -> None:
    for id in ("sc21-001", "megatron-bridge-007"):
        run = sample_runs()[id]
        other = evolve(run, step_seconds=1.5, memory_gib=1.5, memory_kind=run.memory_kind or "allocated")
        assert predict(other).step_seconds == predict(run).step_seconds


def test_megatron_lms_test_with_chunks() -> None:
    run = sample_runs()["gpt3_mcore_te_tp1_pp4_vp1_resume_torch_decoupled_lr/dev_dgx_h100"]
    assert (run.layout.pp, run.layout.vpp, run.layout.dp, run.memory_kind) == (4, 3, 2, "allocated")
    assert run.step_seconds is None


def test_what_megatron_lms_own_tests_allocate() -> None:
    """Attention fused, not, latent; all computed again, fp16, chunks, divided sequences, experts, a BERT, 7 billion;
    norms of queries and keys, a fused loss, tests that need not repeat to the bit, torch's softmax."""
    predictions = [predict(run) for run in sample_runs().values() if run.source == "megatron-functional"]
    assert len(predictions) == 21
    assert max(abs(p.memory_error or 0.0) for p in predictions) < 0.036
    assert median(abs(p.memory_error or 0.0) for p in predictions) < 0.015
    assert all((p.training_run.memory_gib or 0.0) <= p.memory_gib_upper < 1.2 * p.memory_gib for p in predictions)


def test_hybrids_of_mamba_are_read_and_predicted() -> None:
    """Nemotron-H 56B, whose layers are counted, and Nemotron 3 Nano, whose order is known by its name."""
    read_ = sample_runs()
    predictions = {
        id: predict(read_[id]) for id in ("dgxc-benchmarking-010", "megatron-bridge-027", "megatron-bridge-110")
    }
    sizes = [params(p.training_run.model) / 1e9 for p in predictions.values()]
    assert sizes == [pytest.approx(56.3, abs=0.1), pytest.approx(31.6, abs=0.1), pytest.approx(31.6, abs=0.1)]
    assert [p.training_run.sparse for p in predictions.values()] == [False, True, True]
    assert all(abs(p.time_error or 1.0) < 0.05 for p in predictions.values())
    reasons = sample_reasons()
    assert reasons["megatron-bridge-015"] == "hybrid-mamba-latent-moe is not described well enough"


def test_runs_that_ran_out_of_memory_are_told_from_those_that_fill_it() -> None:
    """Three of BLOOM's benchmarks did; of NVIDIA's that ran some fill their GPUs, one in a graph of the iteration."""
    ran = ("bigscience-bloom-0", "bigscience-bloom-122", "megatron-bridge-0")
    predictions = {run.id: predict(run) for run in sample_runs().values() if run.id.startswith(ran)}
    out = {id for id, p in predictions.items() if p.out_of_memory}
    assert len(out) == 3 and out == {id for id, p in predictions.items() if p.training_run.oom}
    full = {
        id for id, p in predictions.items() if p.memory_gib * 2**30 > 0.85 * p.training_run.cluster.device.nbytes
    } - out
    assert full >= {f"megatron-bridge-0{n}" for n in ("07", "35", "87", "88")}
    assert "graphs" in priced_as(sample_runs()["megatron-bridge-007"]).prediction.nbytes[0]


@pytest.mark.parametrize("text", ["", "hello", "{broken"])
def test_a_file_without_runs_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "runs"
    path.write_text(text)
    with pytest.raises(UserError, match=r"rows of training runs"):
        read_runs(path)


ODD = st.sampled_from([None, "", 0, -1, 1.5, "8", "1e3", "abc", True, [], [1], {}, {"a": 1}, 1e30, 10**9, float("nan")])
ROWS = older_rows()
RECORDS = [json.loads(record_line(shipped_records()[id])) for id in ("sc21-001", "simumax-005", "megatron-bridge-027")]


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(ROWS), st.dictionaries(st.sampled_from(sorted(ROWS[0])), ODD, max_size=3), st.data())
def test_a_row_of_any_kind_is_scored_or_left_out_with_its_reason(row: Any, odd: Any, data: st.DataObject) -> None:
    lost = data.draw(st.sets(st.sampled_from(sorted(row)), max_size=2))
    gone = {key: value for key, value in {**row, **odd, "new_field": 1}.items() if key not in lost}
    with NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write(json.dumps(gone))
        file.flush()
        validation = validate_files(file.name)
    assert len(validation.rows) + len(validation.skipped) == 1
    assert all(s.reason for s in validation.skipped)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(RECORDS), st.dictionaries(st.sampled_from(sorted(RECORDS[0])), ODD, max_size=2), st.data())
def test_a_record_of_any_kind_is_scored_or_left_out_with_its_reason(record: Any, odd: Any, data: st.DataObject) -> None:
    lost = data.draw(st.sets(st.sampled_from(sorted(record)), max_size=1))
    gone = {key: value for key, value in {**record, **odd}.items() if key not in lost}
    with NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write(json.dumps(gone))
        file.flush()
        validation = validate_files(file.name)
    assert len(validation.rows) + len(validation.skipped) == 1
    assert all(s.reason for s in validation.skipped)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layers": 1.5}, "layers must be a whole number from 1 to 2,000, got 1.5"),
        ({"hidden": None}, "no hidden"),
        ({"gpu": "H20"}, "unknown device 'H20'"),
        ({"tp": "eight"}, "tp must be a whole number, got 'eight'"),
        ({"step_time_s": -1}, "step_time_s must be positive, got -1"),
        ({"precision_class": "int4"}, "unknown precision 'int4'"),
        ({"num_gpus": 31, "tp": 2}, "tp 2 x pp 1 x cp 1 needs a multiple of 2 GPUs, not 31"),
    ],
)
def test_a_row_that_cannot_be_read_says_why(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n{broken\n[1]\n" + json.dumps({**ROWS[0], **change}))
    runs, skipped = read_runs(path)
    assert [run.id for run in runs] == ["sc21-001"]
    assert [s.reason.partition(":")[0] for s in skipped[:2]] == ["it is not JSON", "it is not a JSON object"]
    assert reason in skipped[2].reason


def test_a_layout_that_needs_more_devices_is_refused(tmp_path: Path) -> None:
    row = {**ROWS[0], "tp": 1, "pp": 4, "ep": 64, "experts": 64, "topk": 2, "num_gpus": 128, "gbs": 4096, "mbs": 1}
    path = tmp_path / "runs.jsonl"
    path.write_text(
        "\n".join(json.dumps({**row, **change}) for change in ({}, {"num_gpus": 256}, {"gbs": 100, "ep": 32}))
    )
    validation = validate_files(path)
    assert len(validation.rows) == 1
    assert ["needs 256 devices or a multiple, but there are 128" in s.reason for s in validation.skipped] == [
        True,
        False,
    ]
    assert "a batch of 100 is not a multiple of dp 32" in validation.skipped[1].reason


def test_what_a_row_leaves_out_follows_from_the_rest(tmp_path: Path) -> None:
    row = {**ROWS[0], "grad_accum": 4, "dp": 32, "mbs": 1, "gbs": 128}
    less = {key: value for key, value in row.items() if key not in ("num_gpus", "gbs", "step_time_s", "framework")}
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps({**less, "tokens_per_s_per_gpu": 1000.0}))
    (run,), _ = read_runs(path)
    assert run.layout.world == 32 and run.workload.batch == 128
    assert run.step_seconds == pytest.approx(128 * run.workload.seq / 32_000)


def test_the_scores_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(OLDER.read_text().splitlines()[:4]))
    assert main(["validate", str(few), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output == json.loads(json.dumps(validation_json(validate_files(few))))
    assert {"source", "gpu", "precision", "rows", "skipped", "median_abs_error", "p90_abs_error", "bias"} <= {
        *output["groups"][0]
    }
    assert output["rows"][0]["id"] == "sc21-001"
    tested = tmp_path / "tested.jsonl"
    tested.write_text(record_line(shipped_records()["bert_mcore_tp1_pp2/dev_dgx_a100"]))
    assert main(["validate", str(few), str(tested), "--json"]) == 0
    both = json.loads(capsys.readouterr().out)["groups"]
    assert {"sc21", "megatron-functional"} <= {group["source"] for group in both}
    assert main(["validate", str(few)]) == 0
    assert "sc21" in capsys.readouterr().out
    assert main(["validate", str(tmp_path / "none")]) == 2


def sweep(times: list[tuple[float, float]]) -> list[Predicted]:
    """Runs of one sweep that differ in their layout, by (predicted, measured) seconds."""
    run = sample_runs()["sc21-001"]
    return [
        Predicted(evolve(run, layout=Layout(dp=i + 1), step_seconds=measured, sweep="one"), predicted, 1.0)
        for i, (predicted, measured) in enumerate(times)
    ]


SECONDS = st.floats(0.1, 100.0)


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=3, max_size=8))
def test_regret_is_none_for_the_best_choice_and_never_negative(times: list[tuple[float, float]]) -> None:
    pairs, first, third = choices(sweep(times))
    assert first is not None and third is not None and first >= third >= 0
    assert pairs is None or 0 <= pairs <= 1
    perfect = choices(sweep([(m, m) for _, m in times]))
    assert perfect[1] == 0
    assert perfect[0] in (None, 1)


def test_two_layouts_are_no_sweep() -> None:
    assert choices(sweep([(1.0, 2.0), (2.0, 1.0)])) == (None, None, None)


def test_pairs_are_counted_by_their_predicted_difference() -> None:
    rows = sweep([(1.0, 10.0), (1.005, 9.0), (1.03, 11.0), (1.3, 12.0)])
    run = rows[0].training_run
    twin = evolve(rows[0], training_run=evolve(run, step_seconds=5.0))  # of the first layout: a pair with all others
    alone = evolve(rows[0], training_run=evolve(run, layout=Layout(dp=9), step_seconds=1.0, sweep="two"))
    found = {one.limit: (one.pairs, one.right) for one in pair_classes([*rows, alone])}
    assert found == {0.01: (1, 0), 0.02: (0, 0), 0.05: (2, 2), 0.1: (0, 0), 0.2: (0, 0), inf: (3, 3)}
    assert sum(one.pairs for one in pair_classes([*rows, twin])) == 9
