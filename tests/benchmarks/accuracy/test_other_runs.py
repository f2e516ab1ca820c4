"""Runs that no constant was fitted to, and rows of the older schema in other words."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.accuracy.__main__ import main
from benchmarks.accuracy.device_words import row_device, row_precision
from benchmarks.accuracy.models.catalog_models import named_example
from benchmarks.accuracy.records import RunRecord, read_record, record_line
from benchmarks.accuracy.row_values import row_flag
from benchmarks.accuracy.run_files import DATA, OTHER_RUNS, shipped_records
from benchmarks.accuracy.scoreboard import TableBy, markdown
from benchmarks.accuracy.scoring import validate_files
from benchmarks.accuracy.training_run import UnfitError
from megaloom.dsl.errors import UserError
from tests.support.published import older_rows

RUNS = DATA / f"{OTHER_RUNS}.jsonl"
ROWS = {row["id"]: row for row in older_rows()}
DENSE, SPARSE, LLAMA = (ROWS[f"other-megatron-bridge-{n}"] for n in ("003", "001", "033"))


def test_every_row_has_a_source_and_a_figure_of_its_own() -> None:
    records = [read_record(line) for line in RUNS.read_text().splitlines()]
    assert len(records) >= 150
    assert len({r.id for r in records}) == len(records)
    for r in records:
        assert isinstance(r, RunRecord) and "https://" in r.reference and (r.measured.step_seconds or 0) > 0


def test_all_are_read_and_most_took_what_was_predicted_at_the_least_and_at_the_most() -> None:
    """The intervals are made to hold nine of ten runs."""
    validation = validate_files(RUNS)
    assert not validation.skipped
    assert 0.8 <= mean(p.inside_interval for p in validation.rows) <= 0.99
    table = markdown(validation, TableBy.SOURCE).splitlines()
    sources = {p.training_run.source for p in validation.rows}
    assert [line.split(" | ")[0] for line in table[2:]] == [f"| {name}" for name in (*sorted(sources), "all")]


def row(tmp_path: Path, changed: dict[str, Any]) -> Any:
    """The run that a changed row is, or why it is none."""
    path = tmp_path / "row.jsonl"
    path.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))
    validation = validate_files(path)
    return validation.rows[0] if validation.rows else validation.skipped[0].reason


@pytest.mark.parametrize("sample", [DENSE, SPARSE])
def test_how_a_row_is_written_does_not_matter(sample: dict[str, Any], tmp_path: Path) -> None:
    """Fields in another order, whole numbers as floats, a precision or a device in other words, words for truths."""
    plain = row(tmp_path, sample)
    other = {key: float(v) if type(v) is int else str(v) if type(v) is bool else v for key, v in sample.items()}
    text = {"bf16": "bfloat16 mixed", "fp8": "FP8-CS", "mxfp8": "FP8-MX", "nvfp4": "FP4"}[sample["precision_class"]]
    other |= {"gpu": f"8x NVIDIA {sample['gpu']} GPUs", "precision": text, "precision_class": None}
    again = row(tmp_path, dict(reversed(other.items())))
    assert again.step_seconds == plain.step_seconds
    assert again.memory_gib == plain.memory_gib


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("H100-SXM5-80GB", "H100"),
        ("8xH100", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("DGX-GB200", "GB200"),
        ("GB300 NVL72", "GB300"),
        ("GB200 (inferred)", "GB200"),
        ("a100", "A100"),
        ("A100-SXM4-80GB", "A100"),
        ("A100-SXM4-40GB", "A100-40GB"),
        ("A100-80GB-PCIe", "A100-PCIe"),
        ("V100-32GB", "V100"),
        ("H200-141GB", "H200"),
        ("H100-PCIe", "H100-PCIE"),  # has less power and no NVLink, and is not known
        ("H100-96GB-HBM2e-500W", "H100-HBM2e-500W"),
        ("H100-500W", "H100-500W"),
    ],
)
def test_a_device_in_other_words(message: str, kind: str) -> None:
    assert row_device({"gpu": message}) == kind


def test_a_device_of_other_memory_is_none_of_ours() -> None:
    assert row_device({"gpu": "A100", "gpu_mem_gb": 40}) == "A100-40GB"
    with pytest.raises(UnfitError, match="a V100 of 16 GB: our preset has 32 GiB"):
        row_device({"gpu": "V100-16GB"})


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("fp8-ds", "fp8"),
        ("FP8 (float8 linear, rest bf16)", "fp8"),
        ("FP8 e4m3 mxfp8", "mxfp8"),
        ("BF16", "bf16"),
        ("bf16 (fp32 gradient accumulation)", "bf16"),
        ("fp16/bf16 mixed", "fp16"),
        ("NVFP4", "nvfp4"),
    ],
)
def test_a_precision_in_other_words(message: str, kind: str) -> None:
    assert row_precision({"precision": message}) == kind


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ("meta-llama/Llama-3.1-8B", "llama3.1-8b"),
        ("meta-llama/Llama-2-70b-chat-hf", "llama2-70b"),
        ("LLAMA3.1_405B", "llama3-405b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("GPT OSS 120B", "gpt-oss-120b"),
        ("nvidia/Nemotron-4-340B-Base", "nemotron4-340b"),
    ],
)
def test_a_model_may_be_named_alone(message: str, name: str) -> None:
    assert named_example(message).model.name == name


def test_a_model_that_is_no_example_needs_its_dimensions() -> None:
    with pytest.raises(UserError, match="llama3-70 is not an example of megaloom; did you mean llama3-70b"):
        named_example("llama3-70")


def test_a_named_model_is_predicted_as_its_dimensions_are(tmp_path: Path) -> None:
    """Llama 3 8B by its dimensions, and by its name; and a mixture, whose experts are divided."""
    sample = LLAMA
    none = dict.fromkeys(("arch", "params_b", "layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab"))
    assert row(tmp_path, {**sample, **none}).step_seconds == row(tmp_path, sample).step_seconds
    mixture = {**sample, **none, "model": "mistralai/Mixtral-8x7B-v0.1", "ep": 8, "cp": 1, "mbs": 1}
    assert row(tmp_path, mixture).training_run.sparse and row(tmp_path, mixture).training_run.layout.ep == 8


@given(st.sampled_from([True, "true", "True", 1, 1.0]), st.sampled_from([False, "false", "False", 0, 0.0]))
def test_truths_in_words(true: object, false: object) -> None:
    assert row_flag({"sp": true}, "sp") and not row_flag({"sp": false}, "sp", default=True)
    assert row_flag({}, "sp", default=True) and not row_flag({"sp": None}, "sp")


def test_recomputed_modules_may_be_a_list(tmp_path: Path) -> None:
    listed, named_ = ({**DENSE, "recompute": text} for text in (["layernorm", "mlp"], "selective:layernorm,mlp"))
    assert row(tmp_path, listed).training_run.layout == row(tmp_path, named_).training_run.layout
    assert (
        row(tmp_path, {**DENSE, "recompute": []}).training_run.layout
        == row(tmp_path, {**DENSE, "recompute": "none"}).training_run.layout
    )


def test_json_of_several_files_is_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """No figure is infinite or NaN if a value was not measured; skipped rows have no prediction."""
    tested, mixed = tmp_path / "tested.jsonl", tmp_path / "mixed.jsonl"
    tested.write_text(record_line(shipped_records()["bert_mcore_tp1_pp2/dev_dgx_a100"]))
    oom = {**DENSE, "id": "oom", "status": "oom", "step_time_s": None, "tokens_per_s_per_gpu": None}
    mixed.write_text("\n".join(map(json.dumps, (DENSE, oom, {**DENSE, "id": "left", "gpu": "H20"}))))
    assert main(["validate", str(mixed), str(tested), "--json"]) == 0
    output = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    groups = {"source", "gpu", "precision", "rows", "skipped", "median_abs_error", "p90_abs_error", "bias"}
    assert all({*groups, "pair_accuracy", "top1_regret"} <= {*g} for g in output["groups"])
    rows = {r["id"]: r for r in output["rows"]}
    assert rows[DENSE["id"]]["measured_step_seconds"] == DENSE["step_time_s"]
    assert rows["oom"]["measured_step_seconds"] is None and rows["oom"]["predicted_memory_gib"] > 0
    assert "left" not in rows
    assert sum(g["rows"] for g in output["groups"]) == len(output["rows"]) == 3
