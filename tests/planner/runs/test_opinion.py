"""The second opinion: its text, rules that a run breaks, what a patch promises, and the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import evolve

from megaloom.dsl import UserError
from megaloom.dsl.catalog import find
from megaloom.dsl.files.json_form import fingerprint
from megaloom.planner.cli import main
from megaloom.planner.contract.plan_json import save
from megaloom.planner.contract.workload import Runtime, Workload
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.runs.opinion import Opinion, second_opinion
from megaloom.planner.runs.patch import write_patch
from megaloom.planner.runs.read import RunInputs, read_file, read_text
from megaloom.planner.runs.run import Measured, TrainingRun
from megaloom.planner.runs.text import opinion_text
from megaloom.planner.search.search import plan as search
from tests.support.limits import LIMIT
from tests.support.paths import TESTS

SCRIPT = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
export HF_TOKEN=hf_secret
TP=8
GPT_ARGS=(
    --num-layers 16
    --hidden-size 2048 --ffn-hidden-size 5632
    --num-attention-heads 16
    --seq-length 4096
    --max-position-embeddings 4096
    --position-embedding-type rope
    --swiglu --disable-bias-linear --normalization RMSNorm
    --attention-dropout 0 --hidden-dropout 0
    --tokenizer-type GPT2BPETokenizer
)
srun torchrun --nnodes $SLURM_NNODES --nproc-per-node 8 pretrain_gpt.py "${GPT_ARGS[@]}" \\
    --tensor-model-parallel-size $TP \\
    --pipeline-model-parallel-size 2 \\
    --sequence-parallel \\
    --micro-batch-size 1 --global-batch-size 128 --bf16 \\
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \\
    --use-distributed-optimizer --overlap-grad-reduce --lr 3e-4 ${EXTRA_ARGS:-}
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "run.sh"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def opinion(script: Path) -> Opinion:
    run = evolve(read_file(str(script), RunInputs()), measured=Measured(2.6))
    return second_opinion(run, cluster("16xH100"))


def test_the_text(opinion: Opinion, script: Path, request: pytest.FixtureRequest) -> None:
    text = opinion_text(opinion).replace(str(script), "run.sh") + "\n"
    golden = TESTS / "golden" / "second_opinion.txt"
    if request.config.getoption("--update"):
        golden.write_text(text)
    assert text == golden.read_text()
    assert len(text.splitlines()) <= 48 and "secret" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_every_fact_has_the_line_that_states_it(opinion: Opinion) -> None:
    lines = SCRIPT.splitlines()
    stated = {fact.name: fact for fact in opinion.run.stated}
    for name, words in {"layers": "--num-layers 16", "tp": "TP=8", "batch": "--global-batch-size 128"}.items():
        origin = stated[name].origin
        assert origin is not None and words in lines[origin.line_number - 1]
    assert stated["vpp"].origin is None


def test_all_changes_together_save_most_and_each_is_worth_it(opinion: Opinion) -> None:
    assert opinion.plan is not None and opinion.best is not None and opinion.together is not None
    step, best = opinion.plan.predicted.step_seconds, opinion.best.predicted.step_seconds
    together = opinion.together.predicted.step_seconds
    assert best * (1 - 1e-9) <= together < step and 1 <= len(opinion.changes) <= 3
    for change in opinion.changes:
        assert change.alone is None or together <= change.alone.predicted.step_seconds
    assert opinion.gain == pytest.approx(1 - best / step)


def test_the_gap_is_to_the_fastest_and_the_changes_lead_to_the_simplest(opinion: Opinion) -> None:
    assert opinion.best is not None and opinion.advised is not None
    fastest, advised = opinion.best.predicted.step_seconds, opinion.advised.predicted.step_seconds
    assert fastest <= advised * (1 + 1e-9) and advised <= 1.01 * fastest
    slower = evolve(opinion.best, layout=evolve(opinion.best.layout, micro_batch=4))
    slower = evolve(slower, predicted=evolve(slower.predicted, step_seconds=1.004 * fastest))
    text = " ".join(opinion_text(evolve(opinion, advised=slower)).split())
    assert f"Advised {slower.layout}, 0.4% slower than the fastest" in text
    same = " ".join(opinion_text(evolve(opinion, advised=opinion.best)).split())
    assert "Advised the fastest: no layout within 1% of it is simpler" in same


def test_causes_are_priced_and_sorted(opinion: Opinion) -> None:
    seconds = [cause.seconds for cause in opinion.causes]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] > 0


@pytest.mark.skipif(shutil.which("patch") is None, reason="the program patch is not installed")
def test_the_patched_file_is_the_run_that_was_promised(opinion: Opinion, script: Path, tmp_path: Path) -> None:
    output = tmp_path / "run.patch"
    told = write_patch(opinion, RunInputs(), str(output))
    assert told.startswith(f"wrote {output}") and "by hand" not in told
    copy = tmp_path / "run.sh"
    copy.write_text(SCRIPT)
    subprocess.run(["patch", str(copy), str(output)], check=True, capture_output=True, timeout=LIMIT)
    run, plan = read_file(str(copy), RunInputs()), opinion.together
    assert plan is not None
    assert (run.layout, run.workload) == (plan.layout, plan.workload)
    assert run.stages == tuple(stage.start for stage in plan.stages)


def broken(change: Callable[[str], str], tmp_path: Path, gpus: str = "16xH100") -> Opinion:
    path = tmp_path / "run.sh"
    path.write_text(change(SCRIPT))
    run: TrainingRun = read_file(str(path), RunInputs(devices=cluster(gpus).count))
    return second_opinion(run, cluster(gpus))


@pytest.mark.parametrize(
    ("old", "new", "gpus", "rule"),
    [
        ("", "", "8xH100", "world"),
        ("--global-batch-size 128", "--global-batch-size 1", "32xH100", "batch"),
        ("--num-attention-heads 16", "--num-attention-heads 4 --kv-channels 512", "16xH100", "tp-heads"),
        ("--seq-length 4096", "--seq-length 4100", "16xH100", "seq"),
    ],
)
def test_runs_that_do_not_start_are_told_so(old: str, new: str, gpus: str, rule: str, tmp_path: Path) -> None:
    found = broken(lambda text: text.replace(old, new) if old else text, tmp_path, gpus)
    assert rule in [violation.rule for violation in found.broken]
    assert found.plan is None and "so this run does not start" in opinion_text(found)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("--num-layers 16", "--num-layers 15", "15 layers do not divide into pp 2 stages"),
        ("--num-layers 16", "--num-layers 16 --num-layers-per-virtual-pipeline-stage 3", "with chunks of 3 layers"),
        ("--hidden-size 2048", "--hidden-size 2040", "hidden size 2040 does not divide into 16 heads"),
        ("--micro-batch-size 1", "", "--micro-batch-size is not stated"),
        ("GPT2BPETokenizer", "Llama2Tokenizer", "the vocabulary of Llama2Tokenizer is not stated"),
        ("--num-layers 16", "--num-layers $LAYERS", "depends on variable LAYERS"),
    ],
)
def test_what_cannot_be_read_is_named(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT.replace(old, new))
    with pytest.raises(UserError) as error:
        read_file(str(path), RunInputs())
    assert message in str(error.value) and "secret" not in str(error.value)


def command(*args: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main.main(args)
    output = capsys.readouterr()
    return code, output.out, output.err


def test_the_command_prints_json(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command("--from", str(script), "--gpus", "H100", "--json", "--measured", "9500ms", capsys=capsys)
    data = json.loads(out)["from"]
    assert code == 0 and data["gpus"] == "16xH100" and data["violations"] == []
    assert data["layout"]["tp"] == 8 and data["workload"]["batch"] == 128
    assert data["measured"]["step_seconds"] == 9.5 and data["flags"] and 0 < data["gain"] < 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "does not state the kind of GPU\ngive it: --gpus 16xH100"),
        (("--gpus", "H100", "--fastest"), "--fastest has no effect with --from"),
        (("--gpus", "H100", "--tp", "2"), "--tp has no effect with --from"),
        (("--gpus", "H100", "--batch", "2"), "--batch has no effect with --from"),
        (("--gpus", "H100", "--env", "X"), "--env must be NAME=VALUE"),
        (("--gpus", "H100", "--measured", "soon"), "--measured must be a time"),
        (("--gpus", "H100", "--version-of", "9.0"), "the defaults of Megatron-LM 9.0 are not known"),
        (("--gpus", "H100", "--env", "EXTRA_ARGS=--mine 3"), "--mine is not a known flag"),
        (("--gpus", "H100", "--set", "num-layers=15"), "15 layers do not divide into pp 2 stages"),
    ],
)
def test_wrong_options_say_what_works(
    args: tuple[str, ...], message: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = command("--from", str(script), *args, capsys=capsys)
    assert (code, out) == (2, "") and message in err


def test_options_of_a_run_need_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = command("gpt2", "--measured", "3s", capsys=capsys)
    assert code == 2 and "--measured has no effect without --from" in err


@pytest.mark.parametrize("name", ["run.json", "run.ipynb", "run.py"])
def test_files_of_other_kinds_are_refused_by_their_kind(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("x = 1\n")
    with pytest.raises(UserError, match="which is not read"):
        read_file(str(tmp_path / name), RunInputs())


def test_an_argument_file_is_read_as_its_command(tmp_path: Path) -> None:
    flags = ["--num-layers 2", "--hidden-size 64 --num-attention-heads 4  # comment", "--seq-length '64' \\"]
    flags += [
        "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8",
        "--tokenizer-type GPT2BPETokenizer",
    ]
    (tmp_path / "run.txt").write_text("# of a run\n\n" + "\n".join(flags))
    command_line = " ".join(flag.partition("#")[0].rstrip("\\") for flag in flags)
    (tmp_path / "run.sh").write_text(f"torchrun --nproc-per-node 4 pretrain_gpt.py {command_line}")
    read, started = (read_file(str(tmp_path / name), RunInputs(devices=4)) for name in ("run.txt", "run.sh"))
    assert (read.layout, read.workload) == (started.layout, started.workload)
    assert fingerprint(read.model) == fingerprint(started.model)
    assert {fact.name: fact.origin and fact.origin.line_number for fact in read.stated}["heads"] == 4
    with pytest.raises(UserError, match=r"the number of GPUs is not stated in .*run\.txt"):
        read_file(str(tmp_path / "run.txt"), RunInputs())
    (tmp_path / "run.txt").write_text("--num-layers '2")
    with pytest.raises(UserError, match=r"run\.txt:1: a quote has no end"):
        read_file(str(tmp_path / "run.txt"), RunInputs(devices=4))


@pytest.mark.parametrize("runtime", [Runtime.MEGALOOM, Runtime.MEGATRON])
def test_a_plan_of_ours_is_a_run_with_its_own_prediction(runtime: Runtime, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    machine, work = cluster("16xH100"), Workload(seq=2048, batch=64)
    model, ref = find("llama3-8b", {"layers": 4})
    found = search(
        model,
        machine,
        work,
        ref=ref,
        fixed={"tp": 4, "micro_batch": 1},
        runtime=runtime,
    )
    save(found.best, path)
    run = read_file(str(path), RunInputs())
    opinion = second_opinion(run, machine)
    assert opinion.plan == evolve(found.best, reasons=())
    assert opinion.best is not None and opinion.best.layout.tp < 4 and opinion.gain > 0.1
    lines = path.read_text().splitlines()
    (tp,) = (fact for fact in run.stated if fact.name == "tp")
    assert tp.origin is not None and lines[tp.origin.line_number - 1].strip() == '"tp": 4,'
    text = opinion_text(opinion)
    assert f" (line {tp.origin.line_number}, now 4)" in text
    with pytest.raises(UserError, match="is a plan, which is not patched"):
        write_patch(opinion, RunInputs(), str(tmp_path / "patch"))


def test_a_damaged_plan_is_refused() -> None:
    with pytest.raises(UserError, match=r"plan\.json"):
        read_text('{"layout": {}, "stages": [], "predicted": {}}', "plan.json", RunInputs())


@pytest.mark.parametrize(
    ("program", "what"),
    [
        ("pretrain_bert.py", "a BERT"),
        ("examples/multimodal/train.py", "a model of images and text"),
        ("tools/run_text_generation_server.py", "nothing: it generates text"),
        ("tasks/main.py", "a classifier"),
    ],
)
def test_programs_that_train_no_gpt_are_refused_by_their_name(program: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT.replace("pretrain_gpt.py", program))
    with pytest.raises(UserError, match=f"trains {what}"):
        read_file(str(path), RunInputs())


def test_another_name_of_the_program_is_said_to_be_assumed(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT.replace("pretrain_gpt.py", "train_llama.py"))
    assert "train_llama.py trains as" in read_file(str(path), RunInputs()).assumed[0].text
