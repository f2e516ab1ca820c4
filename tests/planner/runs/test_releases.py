"""Releases of Megatron-LM: flags that they add and drop, and their defaults."""

from __future__ import annotations

import pytest

from megaloom.dsl import UserError
from megaloom.planner.contract.choices import GradReduce, Shard
from megaloom.planner.runs.megatron.flag import Effect
from megaloom.planner.runs.megatron.newer_flags import NEWER_FLAGS, SINCE, UNTIL
from megaloom.planner.runs.megatron.parser import table
from megaloom.planner.runs.megatron.read import Hints
from megaloom.planner.runs.megatron.versions import check_version, defaults_of, least_release
from megaloom.planner.runs.read import RunInputs, read_text
from megaloom.planner.runs.run import TrainingRun
from tests.support.paths import TESTS

FLAGS = TESTS / "data" / "megatron_lm_newer_flags.txt"
GPT = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 "
    "--seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 2 --global-batch-size 64 --bf16 "
    "--tokenizer-type GPT2BPETokenizer"
)


def run(flags: str, release: str | None = None, ignored: tuple[str, ...] = ()) -> TrainingRun:
    """Return the run of a command with these flags."""
    return read_text(f"{GPT} {flags}", "run.sh", RunInputs(hints=Hints(version=release, ignored=ignored)))


def test_every_flag_that_a_release_adds_is_known_with_its_destination_and_number_of_values() -> None:
    rows = [line.split("\t") for line in FLAGS.read_text().splitlines() if not line.startswith("#")]
    for release, spellings, dest, nargs in rows:
        for name in spellings.split():
            flag = table()[name]
            assert (flag.dest, flag.nargs) == (dest, nargs), name
            assert SINCE.get(name, release) == release, name
    assert set(SINCE) <= {name for row in rows for name in row[1].split()}


def test_newer_flags_are_told_apart_and_say_what_they_change() -> None:
    names = [name for flag in NEWER_FLAGS for name in flag.names]
    assert len(names) == len(set(names))
    assert all(flag.why for flag in NEWER_FLAGS if flag.effect not in (Effect.NOTHING, Effect.READ))
    assert set(UNTIL) <= set(table())


def test_the_release_is_the_first_one_with_every_flag() -> None:
    assert run("").defaults == "Megatron-LM 0.16.1"
    assert run("--use-mup").defaults == "Megatron-LM 0.17"
    assert run("--use-mup --nvtx-ranges --flash-attention-version 3").defaults == "Megatron-LM 0.19"
    assert run("", "0.17").version == "0.17"
    assert not run("").version
    assert least_release(["--nvtx-ranges", "--no-such-flag"]) == "0.18"


@pytest.mark.parametrize(
    ("flags", "release", "message"),
    [
        ("--use-mup", "0.16.1", "Megatron-LM 0.16.1 does not have --use-mup, which 0.17 adds"),
        (
            "--moe-use-legacy-grouped-gemm",
            "0.19.0",
            "0.19.0 does not have --moe-use-legacy-grouped-gemm, which 0.17 drops",
        ),
    ],
)
def test_a_flag_that_a_stated_release_does_not_have_is_refused(flags: str, release: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(flags, release)
    assert run(flags, release, (flags,)).version == release
    assert run(flags).defaults != f"Megatron-LM {release}"


def test_defaults_of_sharding_differ_between_releases() -> None:
    fsdp = (
        "--use-megatron-fsdp --use-distributed-optimizer --ckpt-format fsdp_dtensor --no-gradient-accumulation-fusion"
    )
    assert run(fsdp, "0.18.0").layout.shard is Shard.WEIGHTS
    assert run(fsdp, "0.17.1").layout.shard is not Shard.WEIGHTS
    assert not defaults_of("0.16.1")


MAIN, COMM = "--megatron-fsdp-main-grads-dtype", "--megatron-fsdp-grad-comm-dtype"
IN_BF16 = "--grad-reduce-in-bf16"


@pytest.mark.parametrize(
    ("flags", "release", "result"),
    [
        ("", "0.16.1", GradReduce.FP32),
        (IN_BF16, "0.16.1", GradReduce.BF16),
        (f"{MAIN} bf16", "0.18.0", GradReduce.FP32),  # gradients in fp32, Megatron-LM's default, win
        (f"{MAIN} bf16 {IN_BF16}", "0.18.0", GradReduce.BF16),
        (f"{MAIN} fp32 {IN_BF16}", "0.17.1", GradReduce.FP32),
        ("", "0.19.0", GradReduce.BF16),  # as wide as the weights
        (f"{MAIN} fp32", "0.19.0", GradReduce.FP32),
        (f"{MAIN} fp32 {COMM} fp32 {IN_BF16}", "0.19.0", GradReduce.FP32),
        (f"{MAIN} fp32 {COMM} bf16", "0.19.0", f"{COMM[2:]}|reduced in bf16 and added up in fp32 are not modelled"),
        (f"{MAIN} fp16", "0.19.0", "gradients of Megatron-FSDP in fp16 are not modelled"),
    ],
)
def test_gradients_of_megatron_fsdp_are_those_of_the_release(
    flags: str, release: str, result: GradReduce | str
) -> None:
    fsdp = f"--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --bf16 {flags}"
    if isinstance(result, GradReduce):
        assert run(fsdp, release).layout.grad_reduce is result
        return
    with pytest.raises(UserError, match=result):
        run(fsdp, release)


@pytest.mark.parametrize("text", ["0.20.0", "0.5", "1.0"])
def test_releases_that_are_not_known_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"known are those of 0\.6 to 0\.19\.0"):
        check_version(text)


@pytest.mark.parametrize("text", ["0.²", "newest", "0.1.2.3", ""])
def test_texts_that_are_no_release_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="must be a release"):
        check_version(text)
