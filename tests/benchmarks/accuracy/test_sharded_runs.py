"""Published runs that shard weights or gradients: which are predicted, and how well in the half that was kept back."""

from __future__ import annotations

from collections import Counter
from functools import cache
from statistics import median

from benchmarks.accuracy.published_devices import PUBLISHED_DEVICES
from benchmarks.accuracy.records import LeftOut, RunRecord, run_of_record
from benchmarks.accuracy.run_files import shipped_records
from benchmarks.accuracy.scoring import Predicted, p90, predict
from benchmarks.accuracy.sharded_halves import in_fitted_half
from megaloom.planner.cost.profiles.figures import FigureKind
from megaloom.planner.hardware.presets import DEVICE_FIGURES

NOT_PREDICTED = {  # of 201 that shard weights
    "the layers of nemotron3-super (hybrid-mamba-latent-moe) are not known": ("nemo-automodel", 1),
    "LoRA is no pre-training": ("nemo-automodel", 5),
}


@cache
def sharded_runs() -> tuple[RunRecord, ...]:
    """Return the records of runs that shard weights or gradients."""
    records = (record for record in shipped_records().values() if isinstance(record, RunRecord))
    return tuple(record for record in records if record.layout.fsdp)


@cache
def kept_back() -> tuple[Predicted, ...]:
    """Return the predictions of the half that no constant was fitted to."""
    return tuple(predict(run_of_record(record)) for record in sharded_runs() if not in_fitted_half(record.id))


def test_all_published_runs_are_predicted_but_those_that_say_why() -> None:
    left = Counter((x.reason, x.source) for x in shipped_records().values() if isinstance(x, LeftOut))
    for reason, (source, count) in NOT_PREDICTED.items():
        assert left[reason, source] == count
    assert len(sharded_runs()) == 201 - sum(count for _, count in NOT_PREDICTED.values())
    sources = Counter(record.source for record in sharded_runs())
    assert (sources["llm-foundry"], sources["torchtitan"], sources["megatron-bridge"]) == (132, 32, 6)


def test_the_halves_are_those_that_were_fixed_before_the_fit() -> None:
    fitted = [record.id for record in sharded_runs() if in_fitted_half(record.id)]
    assert len(fitted) == 92
    assert {"llm-foundry-001", "torchtitan-002"} <= {*fitted}
    assert not {"llm-foundry-002", "torchtitan-001"} & {*fitted}


def test_step_times_of_the_half_that_was_kept_back() -> None:
    errors = [abs(p.time_error) for p in kept_back() if p.time_error is not None]
    assert len(errors) >= 90
    assert median(errors) <= 0.06
    assert p90(errors) <= 0.15


def test_step_times_of_llm_foundry_that_were_kept_back() -> None:
    errors = [abs(p.time_error or 0.0) for p in kept_back() if p.training_run.source == "llm-foundry"]
    assert len(errors) >= 60
    assert median(errors) <= 0.04
    assert p90(errors) <= 0.10


def test_memory_of_dense_models_under_megatron_fsdp() -> None:
    """None of these constants was fitted to runs that shard weights."""
    dense = [record for record in sharded_runs() if record.measured.last_rank and not record.layout.ep > 1]
    assert len(dense) == 4
    assert all(abs(predict(run_of_record(record)).memory_error or 0.0) < 0.02 for record in dense)


def test_devices_of_published_runs_have_a_source_for_each_figure() -> None:
    used = {record.device for record in sharded_runs()}
    for name, device in PUBLISHED_DEVICES.items():
        assert name in used
        for field, figure in device.figures.items():
            assert field in DEVICE_FIGURES and figure.source and isinstance(figure.kind, FigureKind)
