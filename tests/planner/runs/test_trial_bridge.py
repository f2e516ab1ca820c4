"""Sections of Megatron-Bridge's recipes: mixed precision that is changed, overlap, and fields that are not known."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.choices import GradReduce
from megaloom.planner.runs.read import RunInputs, read_file, read_text
from megaloom.planner.runs.run import TrainingRun

RECIPE = """
from megatron.bridge import AutoBridge
from megatron.bridge.perf_recipes.common import benchmark_precision
from megatron.bridge.training.comm_overlap import CommOverlapConfig
from megatron.bridge.training.config import ConfigContainer, DDPConfig, TrainingConfig
from megatron.bridge.training.mixed_precision import bf16_mixed, bf16_with_fp8_current_scaling_mixed

def make() -> ConfigContainer:
    cfg = ConfigContainer(
        model=AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-8B").get_model_config(),
        train=TrainingConfig(global_batch_size=32, micro_batch_size=1),
        ddp=DDPConfig(use_distributed_optimizer=True),
        mixed_precision=bf16_mixed(),
    )
    cfg.model.tensor_model_parallel_size = 2
    cfg.model.sequence_parallel = True
    cfg.model.seq_length = 2048
"""


def recipe(*lines: str) -> TrainingRun:
    """Return the run of the recipe with more statements."""
    text = RECIPE + "".join(f"    {line}\n" for line in (*lines, "return cfg"))
    return read_text(text, "mine.py", RunInputs(devices=8, command="make"))


def test_what_is_set_of_a_named_precision_counts() -> None:
    assert recipe().layout.grad_reduce is GradReduce.FP32
    assert recipe("cfg.mixed_precision.grad_reduce_in_fp32 = False").layout.grad_reduce is GradReduce.BF16
    narrow = "cfg.mixed_precision = bf16_with_fp8_current_scaling_mixed()"
    first = recipe(narrow)
    assert first.workload.precision == "fp8" and "some layers stay in bf16" in "\n".join(n.text for n in first.notes)
    every = recipe(narrow, "cfg.mixed_precision.first_last_layers_bf16 = False")
    assert "some layers stay" not in "\n".join(note.text for note in every.notes)
    held = recipe(narrow, "cfg.mixed_precision.fp8_param_gather = False")
    assert held.profile != first.profile
    assert recipe(narrow, "cfg.mixed_precision.fp8 = None").workload.precision == "bf16"
    with pytest.raises(UserError, match=r"--mixed_precision\.own_mixed is not a known flag"):
        recipe('cfg.mixed_precision = "own_mixed"')


@pytest.mark.parametrize(
    ("lines", "overlaps"),
    [
        ((), {}),
        (("cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=True)",), {"gradients", "weights", "tensor"}),
        (("cfg.comm_overlap = CommOverlapConfig(overlap_grad_reduce=False)",), {"weights"}),
        (
            (
                "cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=True)",
                "cfg.model.tensor_model_parallel_size = 1",
            ),
            {"gradients", "weights"},
        ),
        (
            (
                "cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=True)",
                "cfg.ddp = DDPConfig(use_distributed_optimizer=False)",
                "cfg.model.sequence_parallel = False",
            ),
            {},
        ),
    ],
)
def test_the_section_of_overlap_switches_that_of_data_parallel_ranks_on(
    lines: tuple[str, ...], overlaps: set[str]
) -> None:
    found = recipe(*lines).layout.overlaps
    assert {name for name in ("gradients", "weights", "tensor") if name in found} == set(overlaps)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("cfg.ddp.own_buckets = 3", r"--ddp\.own_buckets is not a known flag"),
        ("cfg.optimizer.own_moments = 1", r"--optimizer\.own_moments is not a known flag"),
        ("cfg.train.own_steps = 2", r"--train\.own_steps is not a known flag"),
        ("cfg.mixed_precision.own_format = 'e3m4'", r"--mixed_precision\.own_format is not a known flag"),
        ("cfg.optimizer.optimizer_cpu_offload = True", "an optimizer on the host is not modelled"),
    ],
)
def test_a_field_that_may_change_a_step_is_refused(line: str, message: str) -> None:
    more = [] if "optimizer" not in line else ["cfg.optimizer = OptimizerConfig(lr=1e-4, adam_beta1=0.9)"]
    with pytest.raises(UserError, match=message):
        recipe(*more, line)


def test_fields_that_change_no_step_are_left_out() -> None:
    run = recipe("cfg.train.exit_interval = 5", "cfg.ddp.check_for_nan_in_grad = True", "cfg.ddp.bucket_size = 1000")
    assert "gradients have other buckets" in "\n".join(note.text for note in run.notes)
    assert run.workload.batch == 32


def test_helpers_of_benchmarks_are_followed(tmp_path: Path) -> None:
    folder = tmp_path / "src" / "megatron" / "bridge" / "perf_recipes"
    folder.mkdir(parents=True)
    for one in (folder, folder.parent, folder.parent.parent):
        (one / "__init__.py").write_text("")
    (folder / "common.py").write_text(
        "from megatron.bridge.training.mixed_precision import bf16_mixed\n"
        "def benchmark_precision(cfg):\n"
        '    if hasattr(cfg.model, "use_transformer_engine_op_fuser") and cfg.model.use_transformer_engine_op_fuser:\n'
        "        cfg.model.use_transformer_engine_op_fuser = False\n"
        "    if not isinstance(cfg.mixed_precision, str):\n"
        "        cfg.mixed_precision.grad_reduce_in_fp32 = False\n"
    )
    (folder / "mine.py").write_text(f"{RECIPE}    benchmark_precision(cfg)\n    return cfg\n")
    run = read_file(str(folder / "mine.py"), RunInputs(devices=8, command="make"))
    assert run.layout.grad_reduce is GradReduce.BF16 and run.layout.tp == 2


def test_a_tokenizer_without_a_model_that_takes_the_models_vocabulary_has_one_token_more() -> None:
    def tokens(*lines: str) -> str:
        return {fact.name: fact.value for fact in recipe(*lines).stated}["vocabulary"]

    takes = ("cfg.tokenizer.use_tokenizer_vocab_size = True", "cfg.tokenizer.tokenizer_type = 'NullTokenizer'")
    assert tokens() == "128256"
    assert tokens(*takes, "cfg.tokenizer.vocab_size = cfg.model.vocab_size") == "128257"
    assert tokens(*takes, "cfg.tokenizer.vocab_size = 999") == "1000"
