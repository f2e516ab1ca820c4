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
from megaloom.dsl.json_form import fingerprint
from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import (
    VERSION,
    Plan,
    PlanError,
    Prediction,
    Stage,
    again,
    check,
    dumps,
    load,
    loads,
    save,
)
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.hardware.presets import PRESETS

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
    parts = draw(st.dictionaries(words, seconds, max_size=4).filter(lambda said: sum(said.values()) > 0))
    predicted = Prediction(
        step_seconds=sum(parts.values()),
        within=(draw(seconds), draw(seconds)),
        tokens_per_second_per_device=draw(seconds),
        flops_per_second_per_device=draw(seconds),
        mfu=draw(seconds),
        bubble=draw(seconds),
        breakdown=parts,
        nbytes=tuple(draw(st.dictionaries(words, counts, min_size=1, max_size=3)) for _ in range(pp)),
        moments=tuple(draw(words) for _ in range(pp)),
    )
    return Plan(
        version=VERSION,
        model=draw(words),
        fingerprint=draw(words),
        cluster=evolve(machine, count=layout.world, per_node=draw(st.sampled_from([1, layout.world]))),
        workload=Workload(seq=draw(counts), batch=draw(counts), precision=draw(st.sampled_from(Precision))),
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
        version=VERSION,
        model=ref,
        fingerprint=fingerprint(model),
        cluster=cluster("2xH100"),
        workload=Workload(seq=1024, batch=8),
        layout=Layout(pp=2, micro_batch=2),
        stages=tuple(
            Stage(
                rank=i, chunk=0, start=30 * i, stop=30 + 47 * i, forward_seconds=1e-3, backward_seconds=2e-3, params=7
            )
            for i in range(2)
        ),
        predicted=Prediction(
            step_seconds=0.5,
            within=(0.45, 0.65),
            tokens_per_second_per_device=8192.0,
            flops_per_second_per_device=1e12,
            mfu=0.01,
            bubble=0.2,
            breakdown={"compute": 0.4, "bubble": 0.1},
            nbytes=({"weights": 10}, {"weights": 20}),
            moments=("backward of micro-batch 0", "loss of micro-batch 0"),
        ),
        reasons=("it is an example",),
    )


@given(plans())
def test_a_plan_comes_back_exactly(plan: Plan) -> None:
    assert loads(dumps(plan), "plan.json") == plan


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
    check(plan, find("gpt2")[0])
    with pytest.raises(PlanError, match="the plan is for another model") as caught:
        check(plan, find("gpt2-medium")[0])
    assert again(plan) in str(caught.value)


def test_a_plan_that_was_edited_into_none_is_refused() -> None:
    """What each field allows and the runtime would stumble over, or worse, train without a word."""
    plan, (model, _) = example(), find("gpt2")
    first, last = plan.stages
    for edited, says in (
        (evolve(plan, layout=evolve(plan.layout, micro_batch=3)), "a batch of 8 does not divide"),
        (evolve(plan, layout=evolve(plan.layout, sequence_parallel=True)), "[sp-tp]"),
        (evolve(plan, layout=evolve(plan.layout, vpp=2, pp=1, dp=2)), "[vpp-pp]"),
        (evolve(plan, workload=evolve(plan.workload, seq=4096)), "longer than the 1024 learned positions"),
        (evolve(plan, stages=(first, evolve(last, stop=75))), "nodes 0 to 30, 75, are no cut of the 77 nodes"),
        (evolve(plan, stages=(evolve(first, stop=31), evolve(last, start=31))), "are no cut"),
    ):
        with pytest.raises(PlanError) as caught:
            check(edited, model)
        assert says in str(caught.value)
        assert again(edited) in str(caught.value)


def test_it_is_written_through_links_and_into_devices(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to("plan.json")
    save(example(), tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert load(tmp_path / "plan.json") == example()
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    save(example(), tmp_path / "pipe")
    assert loads(os.read(reading, 1 << 16).decode(), "pipe") == example()
    os.close(reading)
    with pytest.raises(ValueError, match="Is a directory"):
        save(example(), tmp_path)


def test_the_package_exports_what_its_modules_define() -> None:
    """Also where a module has the name of a function."""
    import megaloom.planner

    for name in megaloom.planner.__all__:
        exported = getattr(megaloom.planner, name)
        assert exported.__module__.startswith("megaloom.planner.")
        assert exported.__name__ == name
    assert megaloom.planner.cluster is cluster
    with pytest.raises(AttributeError, match="has no attribute 'plans'"):
        megaloom.planner.plans  # noqa: B018


def broken(*path: str | int, value: Any) -> str:
    """The example's JSON with one field set to `value`, or taken away for `...`."""
    raw = json.loads(dumps(example()))
    place: Any = raw
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "p.json is not JSON"),
        ("{", "p.json is not JSON"),
        ('{"version": 1, "stages": NaN}', "NaN is no number that a plan can hold"),
        ("[" * 100_000, "p.json is not JSON"),
        ("[]", "p.json is JSON, but not a plan"),
        ('{"name": "somebody"}', "p.json is JSON, but not a plan"),
        (broken("version", value=1), "p.json is a plan of version 1; this megaloom reads version 8"),
        (broken("version", value=True), "version True"),
        (broken("reasons", value=...), "the plan has no field 'reasons'"),
        (broken("layout", "tp", value=...), "layout has no field 'tp'"),
        (broken("colour", value="red"), "the plan has an unknown field 'colour'"),
        (broken("layout", "zp", value=1), "layout has an unknown field 'zp'"),
        (broken("layout", "tp", value="1"), "layout.tp must be a whole number, got '1'"),
        (broken("layout", "tp", value=1.5), "layout.tp must be a whole number, got 1.5"),
        (broken("layout", "tp", value=True), "layout.tp must be a whole number, got True"),
        (broken("layout", "tp", value=0), "layout.tp is 0"),
        (
            broken("layout", "recompute", value="some"),
            "layout.recompute must be one of none, selective, full; got 'some'",
        ),
        (broken("layout", value=[]), "layout must be an object with the fields of a Layout, got []"),
        (broken("layout", "dp", value=2), "layout takes 4 devices, and the cluster has 2"),
        (broken("workload", "batch", value=0), "workload.batch is 0"),
        (broken("stages", value="none"), "stages must be a list, got 'none'"),
        (broken("stages", value=[]), "stages are 0"),
        (broken("stages", 1, "params", value=None), "stages[1].params must be a whole number, got None"),
        (broken("stages", 1, "rank", value=0), "stages[1] is chunk 0 of rank 0"),
        (broken("stages", 1, "start", value=31), "stages[1] is nodes 31 to 77"),
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
        (broken("predicted", "nbytes", value=[]), "predicted.nbytes has 0 ranks, and pp is 2"),
        (broken("predicted", "step_seconds", value=-1.0), "predicted.step_seconds is -1: it is more than 0"),
        (broken("predicted", "step_seconds", value=99.0), "s in all, not the parts of 99"),
        (broken("predicted", "breakdown", "bubble", value=-1.0), "predicted.breakdown is"),
        (broken("predicted", "nbytes", 0, value={}), "predicted.nbytes[0] is nothing, or less"),
        (broken("stages", 1, "forward_seconds", value=-1.0), "stages[1] takes less than nothing"),
        (broken("cluster", "device", "nbytes", value=80), "cluster.device: Device H100: nbytes = 80 is not"),
        (broken("cluster", "per_node", value=3), "cluster: 2 devices do not fill nodes of 3"),
    ],
)
def test_damage_is_named(text: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        loads(text, "p.json")
    assert says in str(caught.value)


@settings(max_examples=200)
@given(st.data())
def test_no_damage_is_a_traceback(data: st.DataObject) -> None:
    text = dumps(example())
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 30)))
    damaged = text[:start] + data.draw(st.text(max_size=5)) + text[stop:]
    with suppress(PlanError):  # any other error fails
        assert isinstance(loads(damaged, "p.json"), Plan)


def test_a_plan_with_a_fingerprint_of_another_version_is_refused_with_advice() -> None:
    with pytest.raises(
        PlanError, match=r"made by another version of megaloom.*\nmake it again: plan megaloom\.examples"
    ):
        check(evolve(example(), fingerprint="a743fbab00f785e3"), find("gpt2")[0])
