"""`plan` as its users meet it: what it prints, what it writes, and what it says to wrong input."""

from __future__ import annotations

import json
import re
import resource
import shlex
import subprocess
import sys
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
from attrs import evolve

from megaloom.dsl.find import find
from megaloom.dsl.graph import fingerprint, graph
from megaloom.dsl.printing import show
from megaloom.planner import cli
from megaloom.planner.cluster import PRESETS, cluster
from megaloom.planner.layout import Layout, Recompute, Runtime, Workload
from megaloom.planner.plan import VERSION, Plan, Prediction, Stage, check, load
from megaloom.planner.search.price import Priced
from megaloom.planner.search.queue import Queue
from megaloom.planner.search.search import Found, Rejected
from megaloom.planner.show.explain import holds, loses, report
from megaloom.planner.show.trace import replayed

OWN = """
from megaloom.dsl import Attention, Dim, Embed, Model, RMSNorm, SwiGLU, Unembed, ids, model, repeat, residual, weight

def small() -> Model:
    wte = weight("wte", Dim("vocab", 256), Dim("embed", 64))
    block = residual(RMSNorm(), Attention(heads=4, rope=10_000)) >> residual(RMSNorm(), SwiGLU(128))
    return model("small", ids() >> Embed(wte) >> repeat(4, block) >> RMSNorm() >> Unembed(wte))
"""


def made(layout: Layout, bounds: tuple[int, ...], breakdown: dict[str, float]) -> Plan:
    """A plan of gpt2 on 8xH100 with round figures."""
    model, ref = find("gpt2")
    step = sum(breakdown.values())
    return Plan(
        version=VERSION,
        model=ref,
        fingerprint=fingerprint(model),
        cluster=cluster("8xH100"),
        workload=Workload(seq=1024, batch=64),
        layout=layout,
        stages=tuple(
            Stage(
                rank=i % layout.pp,
                chunk=i // layout.pp,
                start=start,
                stop=stop,
                forward_seconds=0.001 * (i + 1),
                backward_seconds=0.002 * (i + 1),
                params=31_000_000,
            )
            for i, (start, stop) in enumerate(pairwise(bounds))
        ),
        predicted=Prediction(
            step_seconds=step,
            within=(0.9 * step, 1.3 * step),
            tokens_per_second_per_device=8192 / step,
            flops_per_second_per_device=1.25e14,
            mfu=0.125,
            bubble=0.1,
            breakdown=breakdown,
            nbytes=tuple({"weights": (1 + r) << 30, "activations": (9 - r) << 29} for r in range(layout.pp)),
            moments=("backward of micro-batch 0",) * layout.pp,
        ),
        reasons=("A first reason [with brackets].", "A second."),
    )


def example() -> Found:
    half = len(graph(find("gpt2")[0]).nodes) // 2
    cuts = graph(find("gpt2")[0]).cuts
    four = (0, cuts[5], cuts[12], cuts[18], 2 * half + 1)
    fast = made(
        Layout(dp=4, pp=2, vpp=2, micro_batch=2), four, {"forward": 0.75, "backward": 1.5, "pipeline bubble": 0.25}
    )
    more = {"forward": 0.75, "backward": 1.5, "tensor-parallel communication": 0.375}
    slow = made(Layout(dp=4, tp=2, sequence_parallel=True, recompute=Recompute.FULL), (0, 2 * half + 1), more)
    return Found(
        best=fast,
        others=(slow,),
        rejected=(Rejected(Layout(dp=8, micro_batch=8), "81.2 GiB on rank 0, of 79.1"),),
        seconds=0.1,
    )


GOLDEN = """\
  GPUs precision GBS MBS  seq TP PP VP CP EP DP  SP recompute dist-opt   overlap
8xH100      bf16  64   2 1024  1  2  2  1  1  4 off      none      off gradients

         s/step  tok/s/GPU  TFLOP/s/GPU    MFU           memory  bubble  exposed comm
2.500 (2.2-3.2)      3,277          125  12.5%  6.0 of 79.1 GiB   10.0%          0.0%

Why
- A first reason [with brackets].
- A second.

Where the step goes, on the pipeline rank that waits least
                     s   share
forward          0.750   30.0%  #######
backward         1.500   60.0%  ##############
pipeline bubble  0.250   10.0%  ##
a step           2.500  100.0%

Pipeline ranks: milliseconds of one micro-batch, parameters on one device
rank  forward  backward   params  holds
   0     4.00      8.00  62.00 M  embed, positions, blocks 0-1; 5 (mlp), 6-7, 8 (attention)
   1     6.00     12.00  62.00 M  blocks 2-4, 5 (attention); 8 (mlp), 9-11, unembed

Memory of each pipeline rank at its fullest, in GiB
rank weights activations in all at the
   0     1.0         4.5    5.5 backward of micro-batch 0
   1     2.0         4.0    6.0 backward of micro-batch 0

Next best
TP PP VP CP EP DP MBS SP recompute dist-opt s/step   MFU GiB loses by
 2  1  1  1  1  4   1 on      full      off  2.625 12.5% 5.5 5.0% slower: 375 ms more of tensor-parallel communication, 250 ms less of pipeline bubble

Nearest layouts that do not work
layout    cause
dp8 mbs8  81.2 GiB on rank 0, of 79.1
"""  # noqa: E501 (a table's lines are as long as they are)


def test_a_report_reads_well() -> None:
    text = StringIO()
    show(report(example(), graph(find("gpt2")[0]), top=5), text)
    assert text.getvalue() == GOLDEN


def test_on_a_terminal_a_report_has_colours_and_fits() -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    text = Terminal()
    show(report(example(), graph(find("gpt2")[0]), top=5), text)
    assert "\x1b[" in text.getvalue()
    assert "A first reason [with brackets]." in text.getvalue()
    assert "…" not in text.getvalue()


def test_what_a_stage_holds_is_said_by_blocks() -> None:
    g = graph(find("gpt2")[0])
    assert holds(g.nodes, g) == "embed, positions, blocks 0-11, unembed"
    said = [holds(g.nodes[a:b], g) for a, b in pairwise((0, *g.cuts, len(g.nodes)))]
    assert said[:4] == ["embed", "positions", "block 0 (attention)", "block 0 (mlp)"]
    assert said[-2:] == ["layer_norm", "unembed"]


def test_a_loser_names_the_cause_that_adds_most() -> None:
    found = example()
    assert (
        loses(found.best, found.others[0])
        == "5.0% slower: 375 ms more of tensor-parallel communication, 250 ms less of pipeline bubble"
    )
    assert loses(found.best, found.best) == "as quick, but no simpler"
    predicted = found.best.predicted
    fuller = [{**held, "weights": held["weights"] + (3 << 29)} for held in predicted.nbytes]
    other = evolve(found.best, predicted=evolve(predicted, nbytes=tuple(fuller)))
    assert loses(found.best, other) == "as quick, but with 1.5 GiB more memory"


def run(*args: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of `plan`."""
    code = cli.main(args)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_plan_is_printed_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run("gpt2", "--gpus", "8xH100", "--batch", "64", capsys=capsys)
    assert (code, err) == (0, "")
    assert out.startswith("gpt2: 124,439,808 parameters, on 8xH100 (one node); searched in ")
    assert "64 sequences of 1,024 tokens, 65,536 in all (--seq not given)" in out
    assert out.endswith("wrote plan.json; `megaloom train plan.json` trains by it\n")
    assert out.isascii()
    assert all(line == line.rstrip() for line in out.splitlines())
    plan = load("plan.json")
    check(plan, find("gpt2")[0])
    assert sum(plan.predicted.breakdown.values()) == pytest.approx(plan.predicted.step_seconds)
    assert all(reason in out for reason in plan.reasons)


def test_a_model_of_ones_own_with_axes_fixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text(OWN)
    target = tmp_path / "sub.json"
    fixed = ["--tp", "2", "--pp", "2", "--micro-batch", "1", "--recompute", "full", "--no-distributed-optimizer"]
    args = (str(tmp_path / "own.py"), "--gpus", "8xCPU", "--precision", "fp32", *fixed, "-o", str(target))
    code, out, err = run(*args, capsys=capsys)
    assert (code, err) == (0, "")
    x = load(target).layout
    assert (x.tp, x.pp, x.micro_batch, x.recompute, x.distributed_optimizer) == (2, 2, 1, Recompute.FULL, False)
    assert f"wrote {target}" in out


def test_modules_to_recompute_are_named_as_megatron_core_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "plan.json"
    args = ("gpt2", "--gpus", "2xH100", "--batch", "8", "-o", str(target), "--recompute-modules", "mlp", "layernorm")
    code, out, err = run(*args, capsys=capsys)
    assert (code, err) == (0, "")
    assert load(target).layout.again == "selective: layernorm, mlp"
    assert "recompute selective: layernorm, mlp" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["layer_norm"], "no module to recompute is called 'layer_norm'\nthere are core_attn, layernorm, "),
        (
            ["moe"],
            "the model has no moe to compute again [recompute-modules]: recompute selective with any of core_attn, ",
        ),
        (["mlp", "--recompute", "full"], "recompute full computes no modules again, and mlp are named"),
    ],
)
def test_modules_that_cannot_be_recomputed(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "plan.json")
    code, _, err = run("gpt2", "--gpus", "2xH100", "-o", target, "--recompute-modules", *words, capsys=capsys)
    assert code == 2
    assert said in err


def test_a_config_of_hugging_face(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 128, "vocab_size": 256}
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], **small}))
    monkeypatch.chdir(tmp_path)
    code, out, err = run("small", "--gpus", "2xCPU", "--seq", "128", "--batch", "8", capsys=capsys)
    assert (code, err) == (0, "")
    assert out.startswith("small: 224,640 parameters, on 2xCPU")
    planned = load("plan.json")
    assert planned.model == str(tmp_path / "small" / "config.json")
    monkeypatch.chdir("/")
    check(planned, find(planned.model)[0])


def test_json_is_for_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run("gpt2", "--gpus", "4xH100", "--json", "--top", "3", capsys=capsys)
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert set(said) == {"plans", "rejected"}
    assert len(said["plans"]) == 3
    for plan in said["plans"]:
        layout, predicted = plan["layout"], plan["predicted"]
        assert layout["dp"] * layout["tp"] * layout["pp"] * layout["cp"] == 4
        assert sum(predicted["breakdown_seconds"].values()) == pytest.approx(predicted["step_seconds"])
        assert predicted["memory_gib"] == pytest.approx(max(sum(r.values()) for r in predicted["memory_gib_by_rank"]))
        assert {"vpp", "ep", "etp", "micro_batch", "recompute"} < set(layout)
        assert {"tokens_per_second_per_gpu", "mfu"} < set(predicted)
    assert all({"layout", "cause"} == set(r) for r in said["rejected"])
    assert list(tmp_path.iterdir()) == []


def test_a_plan_is_for_what_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Experts one by one wait for our host; Megatron's do not, and its fused kernels are quicker."""
    monkeypatch.chdir(tmp_path)
    given = (
        "mixtral-8x7b",
        "--gpus",
        "64xH100",
        "--seq",
        "4096",
        "--batch",
        "256",
        "--tp",
        "2",
        "--pp",
        "4",
        "--ep",
        "8",
    )
    steps = {}
    for runtime in Runtime:
        code, out, _ = run(*given, "--runtime", runtime, "-o", f"{runtime}.json", capsys=capsys)
        assert code == 0
        assert ("as Megatron-core with Transformer Engine runs it" in out) == (runtime is Runtime.MEGATRON)
        assert ("`megaloom train" in out) == (runtime is Runtime.MEGALOOM)
        planned = load(f"{runtime}.json")
        assert planned.runtime is runtime
        steps[runtime] = replayed(planned, graph(find(planned.model)[0])).seconds
        assert steps[runtime] == pytest.approx(planned.predicted.step_seconds, rel=1e-9)
    assert steps[Runtime.MEGATRON] < steps[Runtime.MEGALOOM]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "requires an argument"),
        (["gpt3"], "did you mean gpt2?"),
        (["missing.py:gpt"], "no file 'missing.py'"),
        (["gpt2", "--gpus", "8xH1000"], "did you mean H100?"),
        (["gpt2", "--gpus", "0xH100"], "ask for at least 1xH100"),
        (["gpt2", "--gpus", "12xH100"], "8xH100 or 16xH100 would"),
        (["gpt2", "--seq", "0"], "seq is at least 1"),
        (["gpt2", "--batch", "0"], "batch is at least 1"),
        (["gpt2", "--batch", "1000000000"], "1,048,576 sequences or less"),
        (["gpt2", "--batch", "64.5"], 'unable to convert "64.5" into int'),
        (["gpt2", "--seq", "4096"], "longer than the 1024 learned positions"),
        (["gpt2", "--tp", "8"], "tp 4 would"),
        (["gpt2", "--tp", "two"], 'unable to convert "two" into int'),
        (["gpt2", "--tp", "0"], "tp is at least 1"),
        (["gpt2", "--dp", "8", "--batch", "12"], "a batch of 8 or 16 would"),
        (["gpt2", "--precision", "fp7"], 'Choose from: "fp32", "bf16", "fp16", "fp8", "mxfp8"'),
        (["gpt2", "--colour"], "`plan --help` lists what can be given"),
        (["gpt2", "--top", "0"], "give at least 1"),
        (["gpt2", "-o", "missing/plan.json"], "in a directory that exists"),
        (["llama3-8b", "--gpus", "1xH100"], "no layout of llama3-8b on 1xH100 fits the memory"),
        (["llama3-8b", "--gpus", "1..2xH100"], "no layout of llama3-8b on 2xH100 fits the memory"),
        (["gpt2", "--gpus", "8..16xH100", "--tp", "0"], "tp is at least 1"),
        (["gpt2", "--gpus", "8..16xH100", "-o", "plan.json"], "makes no plan, so there is none for -o plan.json"),
        (["gpt2", "--pareto", "--html", "plan.html"], "makes no plan, so there is none for --html plan.html"),
        (["gpt2", "--gpus", "8xA100", "--precision", "fp8"], "how fast an A100 computes in fp8"),
    ],
)
def test_wrong_input_says_what_would_work(
    args: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*args, capsys=capsys)
    assert (code, out) == (2, "")
    assert err.startswith("plan: ")
    assert says in err
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_it_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("megaloom.planner.search.search.plan", interrupted)
    assert run("gpt2", capsys=capsys) == (130, "", "plan: interrupted\n")


def test_ctrl_c_takes_the_best_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pushed = Queue.push

    def interrupted(self: Queue, seconds: float, what: object) -> None:
        pushed(self, seconds, what)
        if isinstance(what, Priced):
            raise KeyboardInterrupt

    monkeypatch.setattr(Queue, "push", interrupted)
    code, out, err = run("gpt2", "--gpus", "8xH100", "--batch", "64", capsys=capsys)
    assert (code, err) == (130, "")
    assert re.search(r"searched in [\d.]+ s, then interrupted: at most \d+\.\d% can be gained yet\n", out)
    assert load("plan.json").layout.world == 8
    code, out, _ = run("gpt2", "--gpus", "8xH100", "--batch", "64", "--json", capsys=capsys)
    assert code == 130
    assert 0 <= json.loads(out)["unproven"] < 1


def command(code: str, *args: str) -> list[str]:
    return [sys.executable, "-c", f"import sys\nfrom megaloom.planner.cli import main\n{code}", *args]


def test_help_is_quick() -> None:
    heavy = "{'torch', 'numpy', 'networkx', 'cattrs', 'megaloom.dsl'} & set(sys.modules)"
    code = f"code = main(['--help'])\nassert not {heavy}, {heavy}\nsys.exit(code)"
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        said = subprocess.run(command(code), capture_output=True, text=True, timeout=60, check=True).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) < 0.3
    assert f"Known: {', '.join(PRESETS)}." in " ".join(said.replace("│", "").split())


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    plan = subprocess.Popen(
        command("sys.exit(main())", "gpt2", "-o", str(tmp_path / "plan.json")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert plan.stdout is not None
    plan.stdout.close()
    _, err = plan.communicate(timeout=60)
    assert (plan.returncode, err) == (0, b"")


@pytest.mark.parametrize(
    ("args", "to", "code", "says"),
    [
        ("--help", "| true", 0, ""),
        ("gpt2 -o {}", ">&-", 0, ""),
        ("gpt2 -o {}", "> /dev/full", 2, "plan: cannot write the output: No space left on device\n"),
        ("--help", "> /dev/full", 2, "plan: cannot write the output: No space left on device\n"),
    ],
)
def test_output_that_goes_nowhere_is_no_traceback(args: str, to: str, code: int, says: str, tmp_path: Path) -> None:
    program = shlex.join(command("sys.exit(main())"))
    line = f"set -o pipefail; {program} {args.format(tmp_path / 'plan.json')} {to}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (code, says)
