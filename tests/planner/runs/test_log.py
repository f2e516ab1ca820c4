"""Logs of Megatron-LM: the arguments that they list, the measured step, and what is never shown."""

from __future__ import annotations

import pytest

from megaloom.dsl import UserError, fingerprint
from megaloom.planner.export.export import export_plan
from megaloom.planner.export.target import Target
from megaloom.planner.runs.megatron.field_flags import FIELD_FLAGS
from megaloom.planner.runs.megatron.layers import frequency
from megaloom.planner.runs.megatron.log import is_log, read_log
from megaloom.planner.runs.megatron.parser import Arguments, parse_words
from megaloom.planner.runs.megatron.read import ArgumentSource, Hints, read_run
from megaloom.planner.runs.megatron.stages import chunks
from megaloom.planner.runs.memory_causes import memory_causes
from megaloom.planner.runs.run import Devices, TrainingRun
from megaloom.planner.runs.words import Origin, Word
from tests.support.exported import CASES, case, groups

SECRET = "hf_abcdefghijklmnop"


def log_of(a: Arguments, world: int, prefix: str = "", seconds: tuple[float, ...] = ()) -> str:
    """Return a log that lists these arguments as Megatron-LM leaves them after its checks, and these iterations."""
    listed = {flag.dest: a[flag.dest] for flag in FIELD_FLAGS}
    listed |= {"world_size": world, "virtual_pipeline_model_parallel_size": chunks(a) if chunks(a) > 1 else None}
    listed |= {"lr": 1e-4, "save": SECRET, "padded_vocab_size": None, "add_qkv_bias": a["add_bias_linear"]}
    if a["recompute_activations"]:
        listed["recompute_granularity"] = "selective"
    if listed["expert_tensor_parallel_size"] is None:
        listed["expert_tensor_parallel_size"] = a["tensor_model_parallel_size"]
    if a["moe_layer_freq"].startswith("["):
        listed["moe_layer_freq"] = frequency(a, "moe_layer_freq")
    lines = [f"HF_TOKEN={SECRET}", "------------------------ arguments ------------------------"]
    for name, value in sorted(listed.items()):
        shown = list(value) if isinstance(value, tuple) and len(value) > 1 else value
        shown = shown[0] if isinstance(shown, tuple) else shown
        lines.append(f"{prefix}  {name} {'.' * (48 - len(name))} {shown}")
    lines += ["-------------------- end of arguments ---------------------"]
    for i, one in enumerate(seconds, 1):
        lines.append(
            f" [2026-01-01 00:00:00] iteration {i:8d}/{len(seconds):8d} | consumed samples: 12 | "
            f"elapsed time per iteration (ms): {1e3 * one:.1f} | learning rate: 1.0E-04 |"
        )
        if i == 2:
            lines.append(
                "[Rank 0] (after 2 iterations) memory (MB) | allocated: 100.00 | max allocated: 2048.00 | "
                "reserved: 3000.00 | max reserved: 3000.00"
            )
    return "\n".join(lines)


def arguments_of(name: str) -> tuple[Arguments, int]:
    plan, model = case(name)
    text = export_plan(plan, model, Target.MEGATRON_LM)
    words = [Word(word, Origin("run.sh", 1)) for group in groups(text).values() for word in group]
    return parse_words(words), plan.cluster.count


@pytest.mark.parametrize("prefix", ["", "0: ", "[default0]:"])
@pytest.mark.parametrize("name", CASES)
def test_a_log_is_read_as_the_command_that_wrote_it(name: str, prefix: str) -> None:
    a, world = arguments_of(name)
    text = log_of(a, world, prefix)
    assert is_log(text)
    ours, theirs = read_log(text, "run.log", None, Hints()), read_run(a, ArgumentSource("run.sh", Devices(world)))
    assert (ours.layout, ours.workload, ours.stages) == (theirs.layout, theirs.workload, theirs.stages)
    assert fingerprint(ours.model) == fingerprint(theirs.model)
    assert not any("release" in note.text for note in ours.assumed)


def measured(*seconds: float) -> TrainingRun:
    a, world = arguments_of("gpt2")
    return read_log(log_of(a, world, seconds=seconds), "run.log", None, Hints())


def test_the_measured_step_leaves_out_warm_up_and_outliers_and_says_so() -> None:
    run = measured(30.0, 2.0, 2.0, *[1.0, 1.1, 0.9] * 3, 9.0, 1.0)
    assert run.measured is not None
    assert run.measured.seconds == pytest.approx(1.0) and run.measured.iterations == 10
    assert run.measured.left_out == (
        "iterations up to 3 as warm-up",
        "1 slow intervals (iteration 13), 8.0 s above the median in all",
    )
    assert run.measured.nbytes == 2**31


def said_of_memory(name: str, *changes: tuple[str, str]) -> str:
    """Return what is said of the memory of a log, in which texts are replaced."""
    a, world = arguments_of(name)
    text = log_of(a, world, seconds=(1.0, 1.0, 1.0))
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    run = read_log(text, "run.log", None, Hints())
    assert run.measured is not None
    return "\n".join(memory_causes(run, run.measured))


def test_causes_of_memory_are_told_apart_where_the_log_does() -> None:
    other = "[Rank {}] (after 2 iterations) memory (MB) | allocated: 1.0 | max allocated: {}\n[Rank 0] (after"
    dense = said_of_memory("gpt2")
    assert "fragmentation: torch's allocator holds 952 MiB more" in dense and "experts" not in dense
    assert "NCCL" in dense
    assert "fragmentation cannot be told" in said_of_memory(
        "gpt2", (" | reserved: 3000.00 | max reserved: 3000.00", "")
    )
    assert "experts cannot be told" in said_of_memory("mixtral-8x7b")
    equal = said_of_memory("mixtral-8x7b", ("[Rank 0] (after", other.format(1, 1536.0)))
    assert "imbalance of experts: at most 512 MiB" in equal
    last = said_of_memory("mixtral-8x7b", ("[Rank 0] (after", other.format(127, 1536.0)))  # another pipeline rank
    assert "experts cannot be told" in last


def test_a_log_of_few_iterations_still_has_a_step() -> None:
    only, few = measured(2.5).measured, measured(9.0, 2.0).measured
    assert only is not None and only.seconds == pytest.approx(2.5) and only.left_out == ()
    assert few is not None and few.seconds == pytest.approx(2.0)
    assert measured().measured is None


def test_lines_that_are_not_understood_are_never_shown() -> None:
    run = measured(1.0, 1.0)
    assert SECRET not in repr(run)


def test_the_vocabulary_is_the_one_that_the_log_reports() -> None:
    a, world = arguments_of("gpt2")
    without = a.without(["--vocab-size", "--tokenizer-type"])
    with pytest.raises(UserError, match="the vocabulary is not stated"):
        read_log(log_of(without, world), "run.log", None, Hints())
    text = log_of(without, world) + "\n > padded vocab (size: 50257) with 47 dummy tokens (new size: 50304)"
    run = read_log(text, "run.log", None, Hints())
    assert next(fact.value for fact in run.stated if fact.name == "vocabulary") == "50257"


def test_a_log_says_how_many_devices_there_are() -> None:
    a, world = arguments_of("gpt2")
    text = log_of(a, world)
    assert read_log(text, "run.log", None, Hints()).devices.count == world
    with pytest.raises(UserError, match="give the number of GPUs"):
        read_log(text.replace("world_size", "whirled_size"), "run.log", None, Hints())


@pytest.mark.parametrize("name", ["tensor_model_parallel_size", "num_layers", "hidden_dropout", "swiglu"])
@pytest.mark.parametrize("value", ["[]", "x", "0x10", "99999999999999999999999"])
def test_a_value_of_another_type_is_refused_by_its_line(name: str, value: str) -> None:
    a, world = arguments_of("gpt2")
    lines = log_of(a, world).splitlines()
    number = next(i for i, line in enumerate(lines, 1) if line.startswith(f"  {name} "))
    lines[number - 1] = f"  {name} {'.' * 20} {value}"
    with pytest.raises(UserError) as raised:
        read_log("\n".join(lines), "run.log", None, Hints())
    if name != "hidden_dropout" or not value.isdigit():  # a large rate is a number, and refused as a rate
        assert str(raised.value).startswith(f"run.log:{number}: {name} must be ")
    assert value not in str(raised.value) or value.isdigit()


def test_a_switch_with_no_inside_of_its_name_is_not_given_where_its_default_is_listed() -> None:
    a, world = arguments_of("gpt2")
    begin = "------------------------ arguments ------------------------\n"
    text = log_of(a, world)
    usual, given = (
        text.replace(begin, f"{begin}  torch_fsdp2_reshard_after_forward ............... {value}\n")
        for value in (True, False)
    )
    assert read_log(usual, "run.log", None, Hints()).layout == read_log(text, "run.log", None, Hints()).layout
    with pytest.raises(UserError, match="--torch-fsdp2-no-reshard-after-forward"):
        read_log(given, "run.log", None, Hints())
