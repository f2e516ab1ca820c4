"""Plans on disk: the same value comes back, and nothing else is taken for one."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from megaloom.dsl.catalog import find
from megaloom.dsl.files.json_form import fingerprint
from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plan_json import load, plan_from_json, plan_to_json, save
from megaloom.planner.contract.plan_validation import MEMORY_HOLDERS
from megaloom.planner.contract.planned_model import planned_model
from megaloom.planner.contract.plans import PLAN_VERSION, Plan, PlanError, Prediction, Stage, plan_command
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.hardware.presets import PRESETS
from megaloom.planner.rules.plan_check import check_plan

ROOT = Path(__file__).parents[3]
counts = st.integers(1, 10**12)
seconds = st.floats(0, 1e6)
words = st.text(max_size=20)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    pp, vpp, tp, dp = (draw(st.integers(1, 3)) for _ in range(4))
    bounds = [0]
    for _ in range(pp * vpp):
        bounds.append(bounds[-1] + draw(st.integers(1, 9)))
    stages = tuple(
        Stage(
            rank=i % pp,
            chunk=i // pp,
            start=bounds[i],
            stop=bounds[i + 1],
            forward_seconds=draw(seconds),
            backward_seconds=draw(seconds),
            params=draw(counts),
        )
        for i in range(pp * vpp)
    )
    layout = Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        vpp=vpp,
        sequence_parallel=draw(st.booleans()),
        micro_batch=draw(st.integers(1, 64)),
        recompute=draw(st.sampled_from(Recompute)),
        shard=draw(st.sampled_from(["none", "optimizer"])),
    )
    machine = cluster(f"1x{draw(st.sampled_from(sorted(PRESETS)))}")
    parts = draw(st.dictionaries(words, seconds, max_size=4).filter(lambda message: sum(message.values()) > 1e-9))
    step, shares = sum(parts.values()), st.floats(0.01, 1.0)
    precisions = st.sampled_from(sorted(machine.device.flops))
    work = Workload(seq=draw(counts), batch=draw(counts), precision=Precision(draw(precisions)))
    mfu = draw(shares)
    predicted = Prediction(
        step_seconds=step,
        interval=(step * draw(shares), step * (1 + draw(shares))),
        tokens_per_second_per_device=work.tokens / step / layout.world,
        flops_per_second_per_device=mfu * machine.device.flops[work.precision],
        mfu=mfu,
        bubble=draw(shares),
        breakdown=parts,
        nbytes=tuple(
            {**dict.fromkeys(MEMORY_HOLDERS, 0), **draw(st.dictionaries(words, counts, min_size=1, max_size=3))}
            for _ in range(pp)
        ),
        moments=tuple(draw(words) for _ in range(pp)),
    )
    return Plan(
        version=PLAN_VERSION,
        model=draw(words),
        fingerprint=draw(words),
        cluster=evolve(machine, count=layout.world, per_node=draw(st.sampled_from([1, layout.world]))),
        workload=work,
        layout=layout,
        stages=stages,
        predicted=predicted,
        reasons=tuple(draw(st.lists(words, max_size=3))),
    )


@cache
def example() -> Plan:
    """A plan of gpt2 over two ranks, as good as any."""
    model, ref = find("gpt2")
    return Plan(
        version=PLAN_VERSION,
        model=ref,
        fingerprint=fingerprint(model),
        cluster=cluster("2xH100"),
        workload=Workload(seq=1024, batch=8),
        layout=Layout(pp=2, micro_batch=2),
        stages=tuple(
            Stage(
                rank=i, chunk=0, start=30 * i, stop=30 + 49 * i, forward_seconds=1e-3, backward_seconds=2e-3, params=7
            )
            for i in range(2)
        ),
        predicted=Prediction(
            step_seconds=0.5,
            interval=(0.45, 0.65),
            tokens_per_second_per_device=8192.0,
            flops_per_second_per_device=1e12,
            mfu=1e12 / PRESETS["H100"].device.flops["bf16"],
            bubble=0.2,
            breakdown={"compute": 0.4, "bubble": 0.1},
            nbytes=(
                {**dict.fromkeys(MEMORY_HOLDERS, 0), "weights": 10},
                {**dict.fromkeys(MEMORY_HOLDERS, 0), "weights": 20},
            ),
            moments=("start of the first backward pass (micro-batch 0)", "loss of micro-batch 0"),
        ),
        reasons=("it is an example",),
    )


@given(plans())
def test_a_plan_comes_back_exactly(plan: Plan) -> None:
    assert plan_from_json(plan_to_json(plan), "plan.json") == plan


def test_a_plan_is_saved_whole(tmp_path: Path) -> None:
    plan, path = example(), tmp_path / "plan.json"
    save(plan, path)
    assert load(path) == plan
    save(evolve(plan, reasons=()), path)
    assert load(path).reasons == ()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_plan_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, path = example(), tmp_path / "plan.json"
    save(plan, path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match=r"cannot write the plan to .*plan\.json: No space left on device"):
        save(evolve(plan, reasons=()), path)
    assert load(path) == plan
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_places_that_hold_no_plan(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for path, says in (
        (tmp_path / "none.json", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (tmp_path / "bytes", "is not text"),
    ):
        with pytest.raises(PlanError, match=says):
            load(path)
    with pytest.raises(ValueError, match="in a directory that exists"):
        save(example(), tmp_path / "missing" / "plan.json")


def test_another_model_is_refused() -> None:
    plan = example()
    check_plan(plan, find("gpt2")[0])
    with pytest.raises(PlanError, match="the plan is for another model") as caught:
        check_plan(plan, find("gpt2-medium")[0])
    assert plan_command(plan) in str(caught.value)


def test_a_plan_that_was_edited_into_none_is_refused() -> None:
    """Values that a field's type allows, but with which the runtime would fail or train something else."""
    plan, (model, _) = example(), find("gpt2")
    first, last = plan.stages
    for edited, says in (
        (evolve(plan, layout=evolve(plan.layout, micro_batch=3)), "a batch of 8 is not a multiple of"),
        (evolve(plan, layout=evolve(plan.layout, sequence_parallel=True)), "[sp-tp]"),
        (evolve(plan, layout=evolve(plan.layout, vpp=2, pp=1, dp=2)), "[vpp-pp]"),
        (evolve(plan, workload=evolve(plan.workload, seq=4096)), "longer than the 1024 learned positions"),
        (evolve(plan, stages=(first, evolve(last, stop=75))), "stages[1].stop is 75, and the graph has 79 nodes"),
        (
            evolve(plan, stages=(evolve(first, stop=31), evolve(last, start=31))),
            "stages[0].stop is 31, which is not a cut point",
        ),
    ):
        with pytest.raises(PlanError) as caught:
            check_plan(edited, model)
        assert says in str(caught.value)
        assert plan_command(edited) in str(caught.value)


def test_it_is_written_through_links_and_into_devices(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to("plan.json")
    save(example(), tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert load(tmp_path / "plan.json") == example()
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    save(example(), tmp_path / "pipe")
    assert plan_from_json(os.read(reading, 1 << 16).decode(), "pipe") == example()
    os.close(reading)
    with pytest.raises(ValueError, match="Is a directory"):
        save(example(), tmp_path)


def test_the_package_exports_what_its_modules_define() -> None:
    """Also where a module has the name of a function."""
    import megaloom.planner

    for name in megaloom.planner.__all__:
        exported = getattr(megaloom.planner, name)
        assert exported.__module__.startswith(("megaloom.planner.", "megaloom.dsl."))
        assert exported.__name__ == name
    assert megaloom.planner.cluster is cluster
    with pytest.raises(AttributeError, match="has no attribute 'plans'"):
        megaloom.planner.plans  # noqa: B018


def broken(*path: str | int, value: Any) -> str:
    """The example's JSON with one field set to `value`, or taken away for `...`."""
    raw = json.loads(plan_to_json(example()))
    target: Any = raw
    for key in path[:-1]:
        target = target[key]
    if value is ...:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "p.json is not JSON"),
        ("{", "p.json is not JSON"),
        ('{"version": 1, "stages": NaN}', "a plan cannot hold NaN"),
        ("[" * 100_000, "p.json is not JSON"),
        ("[]", "p.json is JSON, but not a plan"),
        ('{"name": "somebody"}', "p.json is JSON, but not a plan"),
        (broken("version", value=1), "p.json is a plan of version 1; this megaloom reads version 13"),
        (broken("version", value=True), "version True"),
        (broken("reasons", value=...), "the plan has no field 'reasons'"),
        (broken("layout", "tp", value=...), "layout has no field 'tp'"),
        (broken("colour", value="red"), "the plan has an unknown field 'colour'"),
        (broken("layout", "zp", value=1), "layout has an unknown field 'zp'"),
        (broken("layout", "tp", value="1"), "layout.tp must be a whole number, got '1'"),
        (broken("layout", "tp", value=1.5), "layout.tp must be a whole number, got 1.5"),
        (broken("layout", "tp", value=True), "layout.tp must be a whole number, got True"),
        (broken("layout", "tp", value=0), "layout.tp must be at least 1, got 0"),
        (
            broken("layout", "recompute", value="some"),
            "layout.recompute must be one of none, selective, full; got 'some'",
        ),
        (broken("layout", value=[]), "layout must be an object with the fields of a Layout, got []"),
        (broken("layout", "dp", value=2), "layout uses 4 devices, but cluster.count is 2"),
        (broken("workload", "batch", value=0), "workload.batch must be at least 1, got 0"),
        (broken("stages", value="none"), "stages must be a list, got 'none'"),
        (broken("stages", value=[]), "stages must be pp 2 x vpp 1 = 2, got 0"),
        (broken("stages", 1, "params", value=None), "stages[1].params must be a whole number, got None"),
        (broken("stages", 1, "params", value=2**63), "stages[1].params must be at most 8796093022208 elements"),
        (broken("stages", 1, "rank", value=0), "stages[1] must be chunk 0 of rank 1, got chunk 0 of 0"),
        (broken("stages", 1, "start", value=31), "stages[1] must begin at node 30 and not be empty, got [31, 79)"),
        (broken("reasons", value="because"), "reasons must be a list, got 'because'"),
        (
            broken("predicted", "breakdown", "bubble", value="x"),
            "predicted.breakdown['bubble'] must be a number, got 'x'",
        ),
        (broken("predicted", "breakdown", value=[]), "predicted.breakdown must be an object, got []"),
        (
            broken("predicted", "nbytes", 0, "weights", value=1.5),
            "predicted.nbytes[0]['weights'] must be a whole number, got 1.5",
        ),
        (
            broken("predicted", "nbytes", value=[]),
            "predicted.nbytes must have an entry for each of pp 2 pipeline ranks",
        ),
        (broken("predicted", "step_seconds", value=-1.0), "predicted.step_seconds must be more than 0, got -1"),
        (broken("predicted", "step_seconds", value=99.0), "predicted.breakdown must add up to step_seconds, 99"),
        (
            broken("predicted", "breakdown", "bubble", value=-1.0),
            "predicted.breakdown['bubble'] must be at least 0, got -1",
        ),
        (
            broken("predicted", "nbytes", 0, value={"weights": 1, "logits": 1}),
            "predicted.nbytes[0] must have gradients, optimizer, activations, workspace, allocator, runtime",
        ),
        (
            broken("predicted", "nbytes", 0, "weights", value=0),
            "predicted.nbytes[0] must hold at least one byte, and no negative number",
        ),
        (broken("stages", 1, "forward_seconds", value=-1.0), "stages[1].forward_seconds must be at least 0, got -1"),
        (broken("cluster", "device", "nbytes", value=80), "cluster.device: Device H100: nbytes = 80 is not"),
        (broken("predicted", "interval", value=[1.0]), "predicted.interval must be a list of 2, got 1 entries"),
        (broken("predicted", "interval", value=[2.0, 1.0]), "predicted.interval must be two times in seconds, around"),
        (broken("predicted", "interval", value=[0.0, 0.6]), "around step_seconds = 0.5; got 0 and 0.6"),
        (broken("predicted", "mfu", value=5.0), "predicted.mfu must be a share of the device's peak, at most 1, got 5"),
        (broken("predicted", "mfu", value=0.5), "predicted.mfu must be flops_per_second_per_device / "),
        (broken("predicted", "mfu", value=None), "predicted.mfu must be a number, got None"),
        (broken("predicted", "bubble", value=7.0), "predicted.bubble must be a share of the step, at most 1, got 7"),
        (
            broken("predicted", "nbytes", 0, "weights", value=10**30),
            "predicted.nbytes[0] must be at most 8796093022208",
        ),
        (broken("workload", "seq", value=7), "predicted.tokens_per_second_per_device must be seq x batch"),
        (broken("workload", "batch", value=4), "/ step_seconds / devices = 4096, got 8192"),
        (broken("predicted", "mfu", value=-0.1), "predicted.mfu must be at least 0, got -0.1"),
        (broken("cluster", "device", "name", value="TPU"), "cluster.device.name must be one of A100, "),
        (broken("cluster", "device", "flops", value={"int8": 1e15}), "cluster.device.flops must have names among fp32"),
        (broken("workload", "precision", value="int8"), "workload.precision must be one of fp32, bf16"),
        (
            broken("layout", "shard", value="all"),
            "must be one of none, optimizer, gradients, weights; got 'all'",
        ),
        (broken("layout", "grad_reduce", value="fp16"), "layout.grad_reduce must be one of fp32, bf16; got 'fp16'"),
        (broken("layout", "overlaps", value=["all"]), "layout.overlaps must be some of gradients, weights, tensor"),
        (broken("environment", "device", value=3), "environment.device must be a text, got 3"),
        (broken("cluster", "per_node", value=3), "cluster: 2 devices are not a whole number of nodes of 3\nuse 3"),
    ],
)
def test_damage_is_named(text: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_from_json(text, "p.json")
    assert says in str(caught.value)


@settings(max_examples=200)
@given(st.data())
def test_no_damage_is_a_traceback(data: st.DataObject) -> None:
    text = plan_to_json(example())
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 30)))
    damaged = text[:start] + data.draw(st.text(max_size=5)) + text[stop:]
    with suppress(PlanError):  # any other error fails
        assert isinstance(plan_from_json(damaged, "p.json"), Plan)


def test_a_plan_with_a_fingerprint_of_another_version_is_refused_with_advice() -> None:
    with pytest.raises(PlanError, match=r"made by another version of megaloom.*\nplan again: plan megaloom\.examples"):
        check_plan(evolve(example(), fingerprint="a743fbab00f785e3"), find("gpt2")[0])


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("\ufeff" + plan_to_json(example()), encoding="utf-8")
    assert load(tmp_path / "plan.json") == example()


def test_a_plan_of_version_7_is_refused_with_the_command_that_replaces_it() -> None:
    with pytest.raises(PlanError) as caught:
        load(ROOT / "tests" / "golden" / "plan_version_7.json")
    text = str(caught.value)
    assert "is a plan of version 7; this megaloom reads version 13" in text
    assert "plan megaloom.examples.gpt2:gpt2 --gpus 8xH100 --seq 1024 --batch 64 --precision bf16 -o " in text


def test_a_plan_of_version_8_loads_without_padding() -> None:
    plan = load(ROOT / "tests" / "golden" / "plan_version_8.json")
    assert (plan.version, plan.layout.vocab_multiple, plan.layout.tp) == (13, 1, 2)
    check_plan(plan, find("gpt2")[0])


def test_a_plan_of_version_9_loads_without_adapters() -> None:
    plan = load(ROOT / "tests" / "golden" / "plan_version_9.json")
    assert (plan.version, plan.lora, plan.layout.tp) == (13, None, 2)
    check_plan(plan, planned_model(plan))


def test_a_plan_of_version_10_loads_with_gradients_in_fp32() -> None:
    raw = json.loads(plan_to_json(example()))
    assert raw["layout"].pop("grad_reduce") == "fp32"
    assert plan_from_json(json.dumps(raw | {"version": 10}), "p.json") == example()


def test_recompute_of_more_blocks_than_the_model_has_is_refused() -> None:
    layout = evolve(example().layout, recompute=Recompute.FULL, recompute_layers=99)
    with pytest.raises(PlanError, match="recompute_layers is 99, and the model has 12 blocks"):
        check_plan(evolve(example(), layout=layout), find("gpt2")[0])
